#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/provision/pool.h"
#include "bagualu/provision/pool_closing.h"
#include "bagualu/provision/pool_relaxation.h"

namespace bagualu {

/// Linear relaxation, rounding, single moves and pair exchanges; then, if the gap to the bound is
/// above the tolerance, the closing search. Scratch lives in the object: once warm, solving
/// allocates nothing.
/// Source: docs/design.md, "Cost and search".
class PoolSolver {
 public:
  /// See PoolClosing::reserve().
  void reserve(const PoolTolerance& tolerance) { closing_.reserve(tolerance); }

  void solve(const PoolProblem& problem, const PoolTolerance& tolerance, PoolSolution& solution);

 private:
  struct Move {
    double reduced = 0;
    int group = 0;
    int option = 0;
    bool operator<(const Move& other) const {
      return reduced != other.reduced ? reduced < other.reduced : option < other.option;
    }
  };

  bool sweep();
  bool best_single_move();
  bool best_exchange();

  PoolRelaxation relaxation_;
  PoolClosing closing_;
  PoolTotals totals_;
  std::vector<Move> moves_;
};

}  // namespace bagualu
