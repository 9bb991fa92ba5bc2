#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <unordered_map>
#include <vector>

#include "bagualu/provision/policy.h"

namespace bagualu {

/// Everything a decision depends on, word by word; compared in full, so a hash collision is no hit.
/// Note [Cache key]: buckets of loads and of the budget left would hit more often, but the plan
/// handed out would depend on which load filled the bucket first: the same input would not always
/// give the same plan, and after a resume the log would differ. So mitigations are keyed by the
/// exact numbers. The calm plan does not depend on loads and needs no entry (policy_adaptive.cpp).
struct PlanKey {
  std::vector<uint64_t> words;
  bool operator==(const PlanKey&) const = default;
};

/// Gate, storages' fates, plan in force, loads, live bytes and what the rank runs next.
void mitigation_key(const GateInput& input, PlanKey& key);

/// Least recently used plans leave first.
class PlanCache {
 public:
  explicit PlanCache(size_t capacity = 1024) : capacity_(capacity) {}

  /// Returns: the plan, valid until the next insert(), or nullptr. Counts as hit or miss.
  const Plan* find(const PlanKey& key);
  void insert(const PlanKey& key, Plan plan);

  size_t size() const { return entries_.size(); }
  int64_t hits() const { return hits_; }
  int64_t misses() const { return misses_; }

 private:
  // Of the keys that lie in the entries: each is held once.
  struct Hash {
    size_t operator()(const PlanKey* key) const;
  };
  struct Equal {
    bool operator()(const PlanKey* a, const PlanKey* b) const { return *a == *b; }
  };
  struct Entry {
    PlanKey key;
    Plan plan;
  };

  size_t capacity_;
  std::list<Entry> entries_;  ///< most recently used first
  std::unordered_map<const PlanKey*, std::list<Entry>::iterator, Hash, Equal> index_;
  int64_t hits_ = 0;
  int64_t misses_ = 0;
};

}  // namespace bagualu
