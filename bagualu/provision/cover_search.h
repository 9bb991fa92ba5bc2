// Minimal combination: the cheapest choice of at most one option per group that covers a need at
// every point in time. Knows nothing of graphs; plan_search.h translates a plan into this.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace bagualu {

/// `bytes` fewer at the points [begin, end).
struct CoverSegment {
  int begin = 0;
  int end = 0;
  int64_t bytes = 0;
};

struct CoverOption {
  int group = -1;
  int64_t cost_ns = 0;
  int64_t host_bytes = 0;  ///< taken from host_free_bytes
  int first_segment = 0;
  int end_segment = 0;
};

struct CoverProblem {
  std::vector<int64_t> need_bytes;  ///< by point in time: bytes that have to go
  std::vector<CoverSegment> segments;
  std::vector<CoverOption> options;  ///< group by group
  std::vector<int> group_begin;      ///< first option of every group, and the end; size groups + 1
  int64_t host_free_bytes = 0;

  int groups() const { return static_cast<int>(group_begin.size()) - 1; }
};

/// Option index by group, -1 = none.
using CoverChoice = std::vector<int>;

int64_t cover_cost(const CoverProblem& problem, const CoverChoice& choice);

/// Scratch lives in the object, so that deciding allocates nothing once it is warm.
/// Ensures: same problem, same choice; ties go to the lower group, then to the lower option.
class CoverSearch {
 public:
  /// Greedy by cost per byte at the worst point (once counting bytes up to what is still missing,
  /// once all of them), then taking back what is not needed (most expensive first), exchanging one
  /// option for a cheaper one, and taking one that makes several superfluous.
  /// Returns: false if the need was not covered; `choice` is then the last attempt.
  bool improve(const CoverProblem& problem, CoverChoice& choice);

  /// Exact depth-first branch and bound below `cost_ns`, the cost of a known solution.
  /// A leaf counts only if `accept(choice)` says yes. `max_nodes` bounds the work.
  /// Returns: true if a cheaper choice was found; `choice` and `cost_ns` are then set to the best.
  bool close(const CoverProblem& problem, int64_t max_nodes,
             const std::function<bool(const CoverChoice&)>& accept, CoverChoice& choice,
             int64_t& cost_ns);

  /// True if the last close() saw the whole tree, so that its answer is the optimum.
  bool proven() const { return nodes_left_ > 0; }

 private:
  void load(const CoverProblem& problem, const CoverChoice& choice);
  void set(int group, int option);
  int worst_point() const;
  bool covered() const;
  int64_t bytes_at(int option, int point) const;
  int64_t option_cost(int option) const;
  int tightest_point() const;
  void settle();
  bool cover_greedily(bool cap_at_need);
  bool take_back();
  bool exchange();
  bool exchange_group(int group);
  bool insert_and_drop();
  bool repair();

  void order_groups();
  int64_t bound_ns(int depth) const;
  bool hopeless(int depth) const;
  void descend(int depth, int64_t cost, bool fresh);

  const CoverProblem* problem_ = nullptr;
  std::vector<int64_t> missing_;  ///< need left by point
  int64_t host_left_ = 0;
  int64_t changes_left_ = 0;
  CoverChoice choice_;
  std::vector<int> order_;
  std::vector<uint8_t> taken_;                 ///< by option
  std::vector<std::pair<double, int>> tries_;  ///< price, option

  // close()
  const std::function<bool(const CoverChoice&)>* accept_ = nullptr;
  int64_t nodes_left_ = 0;
  int64_t best_cost_ = 0;
  CoverChoice best_;
  int hardest_point_ = -1;
  std::vector<int> sequence_;           ///< groups in the order of branching
  std::vector<int64_t> most_bytes_;     ///< (depth, point): what groups from depth on can give
  std::vector<double> ns_per_byte_;     ///< by depth, at the hardest point
  std::vector<int64_t> hardest_bytes_;  ///< by depth, most a group gives at the hardest point
};

}  // namespace bagualu
