#include "bagualu/schedule/dual_batch_cache.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "bagualu/base/error.h"
#include "bagualu/schedule/dual_batch_bounds.h"

namespace bagualu {
namespace {

constexpr int64_t kMillion = 1'000'000;

// Eight buckets per power of two.
int64_t bucket(int64_t ns) {
  constexpr int kSteps = 8;
  constexpr int kStepBits = 3;
  if (ns < kSteps) return ns;
  const int high = std::bit_width(static_cast<uint64_t>(ns)) - 1;
  return static_cast<int64_t>(high) * kSteps + ((ns >> (high - kStepBits)) & (kSteps - 1));
}

// A bucket needs 10 bits; up to three indices of 18 bits, -1 included, go above it.
int64_t word(int64_t low, int a, int b = 0, int c = 0) {
  constexpr int kIndexBits = 18;
  constexpr int kLowBits = 10;
  const auto field = [](int index) { return static_cast<int64_t>(index + 1); };
  return low | field(a) << kLowBits | field(b) << (kLowBits + kIndexBits) |
         field(c) << (kLowBits + 2 * kIndexBits);
}

// Four lanes: one would wait for its multiplication at every word.
uint64_t hash_words(const std::vector<int64_t>& words) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
  constexpr size_t kLanes = 4;
  const auto mix = [](uint64_t lane, uint64_t word) {
    lane = (lane ^ word) * kOdd;
    return lane ^ lane >> 32;
  };
  uint64_t lanes[kLanes] = {1, 2, 3, 4};
  size_t k = 0;
  for (; k + kLanes <= words.size(); k += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = mix(lanes[lane], static_cast<uint64_t>(words[k + lane]));
    }
  }
  uint64_t hash = words.size();
  for (; k < words.size(); ++k) hash = mix(hash, static_cast<uint64_t>(words[k]));
  for (uint64_t lane : lanes) hash = mix(hash, lane);
  return hash;
}

// Calls with every duration, in the order of PrecedenceTimes' nodes.
template <class Take>
void for_each_ns(const DualBatchInstance& instance, Take take) {
  const auto all = [&](const auto& items) {
    for (const auto& item : items) take(item.ns);
  };
  all(instance.forward);
  all(instance.backward);
  all(instance.weight_grads);
  all(instance.rebuilds);
  all(instance.copies_out);
  all(instance.copies_in);
}

// Largest c / kMillion, rounded down, at most 1, by which every duration is at least the other's.
int64_t least_ratio_ppm(const DualBatchInstance& instance, const std::vector<int64_t>& than_ns) {
  int64_t least = kMillion;
  const int64_t* than = than_ns.data();
  for_each_ns(instance, [&](int64_t ns) {
    if (ns < *than) {
      const auto ratio = static_cast<__int128>(ns) * kMillion / *than;
      least = std::min(least, static_cast<int64_t>(ratio));
    }
    ++than;
  });
  return least;
}

int64_t ratio_ppm(int64_t makespan_ns, int64_t bound_ns) {
  if (bound_ns == 0) return makespan_ns == 0 ? kMillion : std::numeric_limits<int64_t>::max() / 2;
  return static_cast<int64_t>(static_cast<__int128>(makespan_ns) * kMillion / bound_ns);
}

}  // namespace

void ScheduleCache::write_key(const DualBatchInstance& instance, const SolveOptions& options,
                              std::span<const int64_t> budget_state) {
  key_.clear();
  const auto size = [&](const auto& items) { key_.push_back(static_cast<int64_t>(items.size())); };
  size(instance.forward);
  size(instance.backward);
  size(instance.weight_grads);
  size(instance.rebuilds);
  size(instance.copies_out);
  size(instance.copies_in);
  size(instance.comm_order);
  key_.push_back(word(0, instance.weight_lag, instance.rebuild_lead));
  key_.insert(key_.end(), {options.tolerance_ppm, options.tolerance_ns, options.max_labels});
  key_.push_back(word(options.exact, options.beam, options.fuse_above_ops, options.window_layers));
  for (const auto* chain : {&instance.forward, &instance.backward}) {
    for (const ChainOp& op : *chain) {
      key_.push_back(word(bucket(op.ns), static_cast<int>(op.resource), op.host_sync));
    }
  }
  for (const auto& grad : instance.weight_grads) {
    key_.push_back(word(bucket(grad.ns), grad.after_backward));
  }
  for (const auto& rebuild : instance.rebuilds) {
    key_.push_back(word(bucket(rebuild.ns), rebuild.before_backward));
  }
  for (const CopyOut& copy : instance.copies_out) {
    key_.push_back(word(bucket(copy.ns), copy.source_forward, copy.releases_for_forward));
  }
  for (const CopyIn& copy : instance.copies_in) {
    key_.push_back(word(bucket(copy.ns), copy.wanted_by_backward, copy.wanted_by_rebuild,
                        copy.not_before_backward));
  }
  for (const ScheduleItem& item : instance.comm_order) {
    key_.push_back(word(static_cast<int64_t>(item.kind), item.index));
  }
  key_.insert(key_.end(), budget_state.begin(), budget_state.end());
}

DualBatchSchedule ScheduleCache::solve(const DualBatchInstance& instance,
                                       const SolveOptions& options,
                                       std::span<const int64_t> budget_state) {
  write_key(instance, options, budget_state);
  uint64_t hash = hash_words(key_);
  if (options_.hash_bits < 64) hash &= (uint64_t{1} << options_.hash_bits) - 1;
  const int known = find(hash);
  if (known >= 0) {
    DualBatchSchedule schedule;
    if (certify(entries_[static_cast<size_t>(known)], instance, schedule)) {
      ++counts_.hits;
      unlink(known);
      link_newest(known);
      return schedule;
    }
    ++counts_.refused;
  }
  ++counts_.misses;
  DualBatchSchedule schedule = solver_.solve(instance, options);
  if (!schedule.cut_short) keep(hash, known, instance, schedule);
  return schedule;
}

int ScheduleCache::find(uint64_t hash) const {
  const auto [begin, end] = index_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    if (entries_[static_cast<size_t>(it->second)].key == key_) return it->second;
  }
  return -1;
}

// Whether the kept order, at the durations at hand, is as near to a bound as it was, give or take
// the slack. If so, writes it.
bool ScheduleCache::certify(Entry& entry, const DualBatchInstance& instance,
                            DualBatchSchedule& schedule) {
  const int64_t makespan = issue_all(instance, entry.order, state_);
  // Durations at least c times those that a bound was proven for have at least c times the bound.
  const int64_t least = least_ratio_ppm(instance, entry.proven_ns);
  int64_t bound =
      static_cast<int64_t>(static_cast<__int128>(entry.proven_bound_ns) * least / kMillion);
  if (ratio_ppm(makespan, bound) > entry.proven_ratio_ppm + options_.slack_ppm) {
    entry.times.retime(instance);
    const int64_t own = subset_bound_ns(entry.times, entry.critical);
    if (ratio_ppm(makespan, own) > entry.subset_ratio_ppm + options_.slack_ppm) return false;
    bound = std::max(bound, own);
  }
  schedule.order = entry.order;
  schedule.makespan_ns = makespan;
  BGL_CHECK(bound <= makespan, bound, makespan);
  schedule.bound_ns = bound;
  schedule.source = ScheduleSource::kCache;
  return true;
}

void ScheduleCache::keep(uint64_t hash, int replaced, const DualBatchInstance& instance,
                         const DualBatchSchedule& schedule) {
  if (options_.capacity == 0) return;
  if (replaced >= 0) {
    unlink(replaced);
  } else {
    replaced = claim_entry();
    index_.emplace(hash, replaced);
  }
  Entry& entry = entries_[static_cast<size_t>(replaced)];
  entry.hash = hash;
  entry.key = key_;
  entry.order = schedule.order;
  entry.times.build(instance);
  entry.proven_ns.clear();
  for_each_ns(instance, [&](int64_t ns) { entry.proven_ns.push_back(ns); });
  entry.proven_bound_ns = schedule.bound_ns;
  entry.proven_ratio_ppm = ratio_ppm(schedule.makespan_ns, schedule.bound_ns);
  entry.critical = critical_subset(entry.times);
  entry.subset_ratio_ppm =
      ratio_ppm(schedule.makespan_ns, subset_bound_ns(entry.times, entry.critical));
  link_newest(replaced);
}

// A new entry, or the one not used for longest, out of the list and the index.
int ScheduleCache::claim_entry() {
  if (entries_.size() < options_.capacity) {
    entries_.emplace_back();
    return static_cast<int>(entries_.size()) - 1;
  }
  const int entry = oldest_;
  unlink(entry);
  const auto [begin, end] = index_.equal_range(entries_[static_cast<size_t>(entry)].hash);
  for (auto it = begin; it != end; ++it) {
    if (it->second != entry) continue;
    index_.erase(it);
    break;
  }
  ++counts_.evictions;
  return entry;
}

void ScheduleCache::unlink(int entry) {
  Entry& own = entries_[static_cast<size_t>(entry)];
  (own.newer < 0 ? newest_ : entries_[static_cast<size_t>(own.newer)].older) = own.older;
  (own.older < 0 ? oldest_ : entries_[static_cast<size_t>(own.older)].newer) = own.newer;
}

void ScheduleCache::link_newest(int entry) {
  Entry& own = entries_[static_cast<size_t>(entry)];
  own.newer = -1;
  own.older = newest_;
  (newest_ < 0 ? oldest_ : entries_[static_cast<size_t>(newest_)].newer) = entry;
  newest_ = entry;
}

}  // namespace bagualu
