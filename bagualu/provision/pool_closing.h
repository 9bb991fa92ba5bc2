#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/provision/pool.h"
#include "bagualu/provision/pool_relaxation.h"

namespace bagualu {

/// Exact search below a known cost. Options whose reduced cost is above the gap are fixed away;
/// what is left is combined group by group into the Pareto front of (bytes, ns) of a micro-batch,
/// and micro-batch by micro-batch into that of (excess, exposed). States whose reduced costs add up
/// to more than the gap are dropped: the bound proves that nothing better comes of them.
///
/// Micro-batches past their window and bubble are one at first: their excess and exposed time are
/// sums less a constant, and never less than that where they turn out not to be past them. If that
/// promise is not kept, the search is repeated with every micro-batch by itself.
class PoolClosing {
 public:
  /// Touches the memory that a search of this much work may take, so that the first one does not
  /// wait for pages.
  void reserve(const PoolTolerance& tolerance);

  /// Improves `totals` and raises `bound_ns` to what was proven.
  /// Returns: false if max_states or max_work cut the search short; `bound_ns` then stays.
  bool close(const PoolProblem& problem, const PoolRelaxation& relaxation,
             const PoolTolerance& tolerance, PoolTotals& totals, int64_t& bound_ns);

 private:
  struct State {
    int64_t bytes = 0;  // of a micro-batch, or excess of several
    int64_t ns = 0;     // of a micro-batch, or exposed of several
    int64_t fixed = 0;  // of a micro-batch
    double reduced = 0;
    int step = 0;  // in steps_

    bool operator<(const State& other) const {
      const int64_t all = bytes + fixed, others = other.bytes + other.fixed;
      return all != others ? all < others : ns < other.ns;
    }
  };
  /// How a state came about: the option taken last, or the micro-batch added last.
  struct Step {
    int parent = -1;
    int other = -1;
    int group = -1;
    int option = -1;
  };

  bool deepen(bool join_linear, const PoolTolerance& tolerance, PoolTotals& totals,
              int64_t& bound_ns);
  bool search(bool join_linear);
  template <class Chosen>
  bool add_groups(const Chosen& chosen);
  bool add_group(int group);
  void fold_linear();
  bool add_microbatch(int microbatch);
  void keep_pareto(std::vector<State>& front);
  void limit(std::vector<State>& front);
  void take_best(PoolTotals& totals, int64_t& least_cost);
  void restore(int step, PoolTotals& totals) const;
  int new_step(const Step& step);

  const PoolProblem* problem_ = nullptr;
  const PoolRelaxation* relaxation_ = nullptr;
  double gap_ = 0;
  int64_t max_states_ = 0;
  int64_t work_left_ = 0;
  bool complete_ = true;
  std::vector<Step> steps_;
  std::vector<State> front_;  ///< of one micro-batch, sorted
  std::vector<State> total_;  ///< of the micro-batches so far, sorted
  std::vector<State> next_, shifted_, merged_;
};

}  // namespace bagualu
