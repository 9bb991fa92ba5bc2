#pragma once

#include <cstdint>
#include <vector>

namespace bagualu {

/// What one choice of a component does when storages are copied as a whole.
struct TensorOption {
  int64_t device_bytes = 0;
  int64_t link_bytes = 0;
  int64_t ns = 0;
};

struct TensorGroup {
  int first_option = 0;
  int end_option = 0;
  int microbatch = 0;
};

struct TensorProblem {
  std::vector<TensorOption> options;
  std::vector<TensorGroup> groups;
  std::vector<int64_t> window_bytes;  ///< by micro-batch
  std::vector<int64_t> bubble_ns;     ///< by micro-batch
  int64_t budget_bytes = 0;
  int64_t host_bytes = 0;       ///< limit of all links together
  double link_ns_per_byte = 0;  ///< past the windows; 0 = nothing goes past them
};

/// The last mile below the pool (pool.h), where a window and whole tensors do not fit together: few
/// and large tensors. Small problems are searched through, others by exchanges of one or two
/// choices. Work is bounded by counts, not by a clock.
class TensorSearch {
 public:
  static constexpr int64_t kMaxNodes = 60'000;
  static constexpr int64_t kMaxTrials = 40'000;
  static constexpr size_t kMaxSearchedGroups = 20;

  /// Improves `choice` (option by group; may be infeasible at first) down to `enough_ns`.
  /// Returns: true if the search ran to its end, so that the result is the optimum.
  bool improve(const TensorProblem& problem, int64_t enough_ns, std::vector<int>& choice);

  bool feasible() const { return cost_ < kInfeasible; }
  int64_t cost_ns() const { return cost_; }

 private:
  static constexpr int64_t kInfeasible = INT64_MAX / 4;

  struct Sums {
    int64_t link = 0;
    int64_t ns = 0;
  };
  struct Standing {  // lower is better: cost, then bytes on the device
    int64_t cost = 0;
    int64_t device = 0;
    bool operator<(const Standing& other) const {
      return cost != other.cost ? cost < other.cost : device < other.device;
    }
  };

  void unset(int group);
  void set(int group, int option);
  Standing standing() const;
  bool search_through();
  void descend(int group);
  bool improve_once();

  const TensorProblem* problem_ = nullptr;
  std::vector<int> choice_, best_;
  std::vector<Sums> sums_;
  int64_t device_ = 0;
  int64_t host_ = 0;
  int64_t cost_ = 0;
  int64_t nodes_left_ = 0;
  int64_t trials_left_ = 0;
  Standing best_standing_;
};

}  // namespace bagualu
