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
class PoolClosing {
 public:
  /// Improves `totals` and raises `bound_ns` to what was proven.
  /// Returns: false if max_states or max_work cut the search short; `bound_ns` then stays.
  bool close(const PoolProblem& problem, const PoolRelaxation& relaxation,
             const PoolTolerance& tolerance, PoolTotals& totals, int64_t& bound_ns);

 private:
  struct State {
    int64_t bytes = 0;  // of a micro-batch, or excess of several
    int64_t ns = 0;     // of a micro-batch, or exposed of several
    double reduced = 0;
    int parent = -1;  // state before the last option, or of the micro-batches before
    int other = -1;   // of several: the state of the last micro-batch
    int option = -1;
    int group = -1;
  };

  bool add_group(int group);
  bool add_microbatch(int microbatch);
  bool before(int a, int b) const;
  void keep_pareto(std::vector<int>& front);
  void limit(std::vector<int>& front);
  void restore(int state, PoolTotals& totals) const;

  const PoolProblem* problem_ = nullptr;
  const PoolRelaxation* relaxation_ = nullptr;
  double gap_ = 0;
  int64_t max_states_ = 0;
  int64_t work_left_ = 0;
  bool complete_ = true;
  std::vector<State> states_;
  std::vector<int> front_;  ///< of one micro-batch, indices in states_
  std::vector<int> total_;  ///< of the micro-batches so far
  std::vector<int> next_, shifted_, merged_;
};

}  // namespace bagualu
