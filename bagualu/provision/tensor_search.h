#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bagualu {

/// What one choice of a component does when storages are copied as a whole.
struct TensorOption {
  int64_t device_bytes = 0;
  int64_t link_bytes = 0;
  int64_t ns = 0;
  bool operator==(const TensorOption&) const = default;
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
  double ns_per_byte = 0;       ///< about what a byte on the device is worth
};

/// The last mile below the pool (pool.h), where a window and whole tensors do not fit together: few
/// and large tensors. Small problems are searched through. Others are annealed from the plan at
/// hand (Kirkpatrick et al. 1983; a fixed sequence of random numbers, so that equal problems get
/// equal plans) and then improved by changes of one or two choices; of groups that offer and do the
/// same, two stand for all. Work is bounded by counts, not by a clock.
class TensorSearch {
 public:
  static constexpr int64_t kMaxNodes = 60'000;
  static constexpr size_t kMaxSearchedGroups = 20;

  /// Improves `choice` (option by group; may be infeasible at first) down to `enough_ns`, trying at
  /// most about `max_trials` changes.
  /// Returns: true if the search ran to its end, so that the result is the optimum.
  bool improve(const TensorProblem& problem, int64_t enough_ns, int64_t max_trials,
               std::vector<int>& choice);

  bool feasible() const { return cost_ < kInfeasible; }
  int64_t cost_ns() const { return cost_; }

 private:
  static constexpr int64_t kInfeasible = INT64_MAX / 4;

  struct Sums {  // of one micro-batch
    int64_t link = 0;
    int64_t ns = 0;

    void add(const TensorOption& option, int64_t sign) {
      link += sign * option.link_bytes;
      ns += sign * option.ns;
    }
  };
  struct Standing {  // lower is better: cost (if it does not fit, by how much), bytes on the device
    int64_t cost = 0;
    int64_t device = 0;
    bool operator<(const Standing& other) const {
      return cost != other.cost ? cost < other.cost : device < other.device;
    }
  };
  struct Change {
    int64_t device = 0, host = 0, exposed = 0, past = 0;
  };
  struct Move {
    int group = 0;
    int option = 0;
  };

  void load(const std::vector<int>& choice);
  void set(int group, int option);
  void unset(int group);
  int64_t exposed_ns(int microbatch, const Sums& sums) const;
  int64_t past_window(int microbatch, const Sums& sums) const;
  Standing standing(int64_t device, int64_t host, int64_t exposed, int64_t past) const;
  Standing now() const { return standing(device_, host_, exposed_, past_); }
  Standing with(const Move& move) const;
  Standing with(const Move& move, const Move& other) const;
  bool search_through();
  void descend(int group);
  void descend_from_here(bool by_two);
  void anneal(int64_t gap_ns, int64_t steps);
  Change change_of(const Move& move) const;
  /// Cost after a change, and what is broken at its price.
  double energy(const Change& change) const;
  void find_twins();
  void list_moves();
  bool change_one();
  bool change_two();

  const TensorProblem* problem_ = nullptr;
  std::vector<int> choice_, best_;
  std::vector<Sums> sums_;
  int64_t device_ = 0;
  int64_t host_ = 0;
  int64_t exposed_ = 0;
  int64_t past_ = 0;  // windows, if nothing may go past them
  int64_t cost_ = 0;
  int64_t nodes_left_ = 0;
  int64_t trials_left_ = 0;
  Standing best_standing_;
  Standing here_;
  uint64_t random_ = 0;
  std::vector<int> twin_;        // by group: the first group that offers the same
  std::vector<uint8_t> listed_;  // by option of a first twin
  std::vector<Move> moves_;
  size_t next_move_ = 0;  // where the search for two changes goes on
};

}  // namespace bagualu
