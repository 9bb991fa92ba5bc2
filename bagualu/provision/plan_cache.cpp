#include "bagualu/provision/plan_cache.h"

#include <utility>

namespace bagualu {
namespace {

constexpr uint64_t kHashPrime = 0x100000001b3;  // FNV-1a, over words
constexpr uint64_t kHashStart = 0xcbf29ce484222325;

}  // namespace

// Resting micro-batches have no place here: with any, decisions are not cached.
void mitigation_key(const GateInput& input, PlanKey& key) {
  key.words.clear();
  key.words.push_back(static_cast<uint64_t>(static_cast<int64_t>(input.gate)));
  uint64_t packed = 0;
  int filled = 0;
  for (StorageFate fate : input.state->storage) {
    packed = (packed << 4) | static_cast<uint64_t>(fate);
    if (++filled < 16) continue;
    key.words.push_back(packed);
    packed = 0;
    filled = 0;
  }
  key.words.push_back(packed);
  for (const auto& pending : input.state->pending) {
    key.words.push_back((static_cast<uint64_t>(pending.storage) << 32) |
                        static_cast<uint32_t>(pending.segment));
  }
  for (ResidencyId residency : input.plan->residency) key.words.push_back(residency);
  key.words.push_back((input.plan->eager_drain ? 2u : 0u) | (input.plan->prefetch ? 1u : 0u));
  for (const LayerLoad& load : *input.loads) {
    key.words.push_back(static_cast<uint64_t>(load.rows));
    key.words.push_back(static_cast<uint64_t>(load.piece_rows));
  }
  key.words.push_back(static_cast<uint64_t>(input.memory.live_bytes));
  key.words.push_back(static_cast<uint64_t>(input.memory.host_live_bytes));
  key.words.push_back(static_cast<uint64_t>(input.backward_resting_bytes));
  for (PassKind pass : input.ahead) key.words.push_back(static_cast<uint64_t>(pass));
}

size_t PlanCache::Hash::operator()(const PlanKey* key) const {
  uint64_t hash = kHashStart;
  for (uint64_t word : key->words) hash = ((hash ^ word) * kHashPrime) ^ (hash >> 29);
  return static_cast<size_t>(hash);
}

const Plan* PlanCache::find(const PlanKey& key) {
  const auto found = index_.find(&key);
  if (found == index_.end()) {
    ++misses_;
    return nullptr;
  }
  ++hits_;
  entries_.splice(entries_.begin(), entries_, found->second);
  return &entries_.front().plan;
}

void PlanCache::insert(const PlanKey& key, Plan plan) {
  if (capacity_ == 0) return;
  const auto found = index_.find(&key);
  if (found != index_.end()) {
    found->second->plan = std::move(plan);
    return;
  }
  if (entries_.size() >= capacity_) {
    index_.erase(&entries_.back().key);
    entries_.pop_back();
  }
  entries_.push_front({key, std::move(plan)});
  index_[&entries_.front().key] = entries_.begin();
}

}  // namespace bagualu
