// Schedules found before, for instances of the same structure and nearly the same durations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "bagualu/schedule/dual_batch.h"
#include "bagualu/schedule/dual_batch_issue.h"
#include "bagualu/schedule/dual_batch_solver.h"
#include "bagualu/schedule/dual_batch_times.h"

namespace bagualu {

struct ScheduleCacheOptions {
  size_t capacity = 1024;  ///< schedules; the one not used for longest goes first
  /// A kept order is used while its makespan over the bound is at most this much, in millionths,
  /// above what it was when it was found.
  int64_t slack_ppm = 10'000;
  int hash_bits = 64;  ///< fewer make keys collide, for tests
};

struct ScheduleCacheCounts {
  int64_t hits = 0;
  int64_t misses = 0;
  int64_t refused = 0;  ///< of the misses: a kept order was too far from the bound
  int64_t evictions = 0;
};

/// solve() that remembers. The key is everything of the instance that an order depends on, the
/// durations in buckets of a ratio of about 1.09, and the caller's own words; keys are compared in
/// full. A kept order is replayed on the durations at hand and certified anew before it is used: no
/// hit is called optimal because the schedule was optimal when it was kept.
/// Threads: one at a time. With a pinned comm_order the ranks of a group may hold different caches.
/// Cost: a hit up to 3 us for 4 layers, see bench/results.
class ScheduleCache {
 public:
  explicit ScheduleCache(const ScheduleCacheOptions& options = {}) : options_(options) {}

  /// `budget_state` distinguishes what the instance does not show (the provision class of each
  /// layer, the phase); it may be empty.
  /// Returns: as solve(); source is kCache for a hit.
  DualBatchSchedule solve(const DualBatchInstance& instance, const SolveOptions& options = {},
                          std::span<const int64_t> budget_state = {});

  const ScheduleCacheCounts& counts() const { return counts_; }
  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    uint64_t hash = 0;
    std::vector<int64_t> key;
    std::vector<ScheduleItem> order;
    // The order was found for these durations, by node, and is proven to be within this ratio of
    // what is possible.
    std::vector<int64_t> proven_ns;
    int64_t proven_bound_ns = 0;
    int64_t proven_ratio_ppm = 0;
    // A second bound, for durations that moved too far: nodes of the compute stream whose load
    // bounds the makespan best, and the ratio to that bound.
    PrecedenceTimes times;
    std::vector<int> critical;
    int64_t subset_ratio_ppm = 0;
    int newer = -1;
    int older = -1;
  };

  void write_key(const DualBatchInstance& instance, const SolveOptions& options,
                 std::span<const int64_t> budget_state);
  int find(uint64_t hash) const;
  bool certify(Entry& entry, const DualBatchInstance& instance, DualBatchSchedule& schedule);
  void keep(uint64_t hash, int replaced, const DualBatchInstance& instance,
            const DualBatchSchedule& schedule);
  int claim_entry();
  void unlink(int entry);
  void link_newest(int entry);

  ScheduleCacheOptions options_;
  ScheduleCacheCounts counts_;
  DualBatchSolver solver_;
  IssueState state_;
  std::vector<int64_t> key_;  ///< of the instance at hand
  std::vector<Entry> entries_;
  std::unordered_multimap<uint64_t, int> index_;
  int newest_ = -1;
  int oldest_ = -1;
};

}  // namespace bagualu
