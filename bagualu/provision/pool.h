// The optimizer of provisioning: a multiple-choice knapsack in which saved bytes and bytes
// offloaded inside the link's free window are one pool. Knows nothing of graphs; stage_plan.h and
// plan_search.h translate into this.
//
//   minimise    sum_m max(0, ns_m - bubble_m) + price * overflow
//   subject to  sum_m (fixed_m + max(0, bytes_m - window_m)) - overflow <= budget,
//               0 <= overflow <= overflow limit, overflow <= sum_m max(0, bytes_m - window_m),
//               one option per group
//
// with bytes_m, fixed_m, ns_m the sums over the chosen options of micro-batch m. The price of
// memory never exceeds the link's: past the windows a byte costs `price` and no more.
//
// Glossary
//   excess     fixed_m + max(0, bytes_m - window_m): what micro-batch m holds on the device
//   exposed    max(0, ns_m - bubble_m)
//   overflow   bytes that go over the link past the windows
// Invariants
//   Same problem, same solution: no clock, no random number. Ties go to the lower group.
#pragma once

#include <cstdint>
#include <vector>

namespace bagualu {

struct PoolOption {
  int64_t bytes = 0;
  int64_t ns = 0;
  int64_t fixed_bytes = 0;  ///< never go over the link (encoded copies)
};

struct PoolGroup {
  int first_option = 0;
  int end_option = 0;
  int microbatch = 0;
};

struct PoolMicrobatch {
  int64_t window_bytes = 0;  ///< go over the link at no exposed time
  int64_t bubble_ns = 0;     ///< compute that is hidden
};

/// All bytes and times at least 0. Groups in order of their micro-batches; every group has an
/// option.
struct PoolProblem {
  std::vector<PoolOption> options;
  std::vector<PoolGroup> groups;
  std::vector<PoolMicrobatch> microbatches;
  int64_t budget_bytes = 0;
  double link_ns_per_byte = 0;
  int64_t overflow_limit_bytes = 0;

  void clear();
};

/// Sums of a choice, kept up to date move by move.
class PoolTotals {
 public:
  void load(const PoolProblem& problem, const std::vector<int>& choice);
  void set(int group, int option);
  /// Cost after the group took this option; if the overflow limit is broken, kInfeasible plus the
  /// bytes by which it is.
  int64_t cost_with(int group, int option) const;
  int64_t cost_with(int group, int option, int other_group, int other_option) const;
  int64_t cost() const;
  int64_t overflow() const;
  const std::vector<int>& choice() const { return choice_; }
  const PoolProblem& problem() const { return *problem_; }

  static constexpr int64_t kInfeasible = INT64_MAX / 4;

 private:
  struct Sums {
    int64_t bytes = 0;
    int64_t ns = 0;
    int64_t fixed = 0;

    void add(const PoolOption& option, int64_t sign) {
      bytes += sign * option.bytes;
      ns += sign * option.ns;
      fixed += sign * option.fixed_bytes;
    }
    int64_t excess(const PoolMicrobatch& limits) const {
      return fixed + (bytes > limits.window_bytes ? bytes - limits.window_bytes : 0);
    }
    int64_t exposed(const PoolMicrobatch& limits) const {
      return ns > limits.bubble_ns ? ns - limits.bubble_ns : 0;
    }
  };
  int64_t cost_of(int64_t excess, int64_t exposed, int64_t fixed) const;

  const PoolProblem* problem_ = nullptr;
  std::vector<int> choice_;
  std::vector<Sums> sums_;  // by micro-batch
  int64_t excess_ = 0;
  int64_t exposed_ = 0;
  int64_t fixed_ = 0;
};

/// Price of `bytes` past the free ones, rounded up.
int64_t link_ns(double ns_per_byte, int64_t bytes);

/// Price of `overflow` bytes, rounded up; past the limit PoolTotals::kInfeasible and by how much.
int64_t overflow_ns(const PoolProblem& problem, int64_t overflow);

/// When a solution is good enough, and how much work may be spent on getting there: counts, not a
/// clock, so that the same problem gets the same solution.
struct PoolTolerance {
  double relative = 0.01;
  int64_t absolute_ns = 50'000;
  int64_t max_states = 1'000;   ///< closing search: live at once
  int64_t max_work = 200'000;   ///< closing search: states made in all
  int max_packings = 100;       ///< stage plans: choices tried with whole tensors
  int max_forced = 20;          ///< stage plans: components whose options are forced in turn
  int64_t max_trials = 60'000;  ///< stage plans: changes of whole tensors tried

  /// The gap that is accepted at this cost.
  int64_t gap_ns(int64_t cost_ns) const;
  static PoolTolerance exact();
  /// For a decision at a gate, which the rank waits for: the default takes some milliseconds where
  /// tensors are large and few.
  static PoolTolerance at_gate();
};

struct PoolSolution {
  bool feasible = false;
  int64_t missing_bytes = 0;  ///< if not feasible
  std::vector<int> choice;    ///< option index by group
  int64_t cost_ns = 0;
  int64_t bound_ns = 0;  ///< certified: no choice costs less
  int64_t overflow_bytes = 0;
  double ns_per_byte = 0;  ///< price of a byte on the device at the relaxation's optimum
  bool closed = false;     ///< the closing search was needed and ran to its end
};

}  // namespace bagualu
