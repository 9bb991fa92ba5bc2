#pragma once

#include <cstdint>
#include <set>

#include "bagualu/sim/rank_places.h"
#include "bagualu/sim/scenario.h"
#include "bagualu/sim/stage_model.h"

namespace bagualu {

/// The rank with the most rows in a layer over the mean, rows summed over micro-batches, of all
/// replicas in one iteration. Ties: the first.
struct HottestRank {
  RankPlace place;
  int64_t moe_layer = -1;  ///< -1: the model has no experts
  double imbalance = 1;
  /// Pipeline ranks where the same member of the same replica is as hot in a layer.
  std::set<int> as_hot{};
};

/// `draw`: which of the routing's iterations.
HottestRank hottest_rank(const Scenario& scenario, const StageModel& model, int64_t draw);

}  // namespace bagualu
