#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "bagualu/provision/floor.h"
#include "bagualu/provision/rank_driver.h"
#include "bagualu/schedule/overlap_order.h"
#include "bagualu/schedule/sends.h"

namespace bagualu {

/// What rank `rank` of an order is to do.
RankProgram rank_program(const OverlapOrder& order, const SendPlan& sends, int rank);

/// Largest number of micro-batches of a virtual stage that the rank holds at once, from the start
/// of a forward to the end of its input gradient, both passes of a pair counting as one.
int most_in_flight(const RankProgram& program, int stage);

/// Largest number of flights that are open at once: most_in_flight() over all stages, with receives
/// posted early, weight gradients put off and last sends not awaited.
int most_flights(const RankProgram& program);

/// Largest number of messages between stages that the rank holds beside that: receives posted for a
/// later pass, and outputs whose send is not awaited.
int most_boundaries(const RankProgram& program);

/// The least budget of a rank's activations under which any routing survives.
/// Source: docs/design.md Eq. 13a, its sum over stages, and the boundaries.
struct RankFloor {
  int64_t activation_bytes = 0;
  int64_t host_bytes = 0;
  int64_t boundary_bytes = 0;  ///< part of activation_bytes
  std::vector<Floor> stages;   ///< by stage of the rank
  std::vector<int> in_flight;  ///< by stage of the rank
};

/// Shapes: graphs and worst_case by stage of the rank; stages: their numbers
RankFloor rank_floor(const RankProgram& program, const std::vector<int>& stages,
                     const std::vector<const Graph*>& graphs, const LayerLoad& worst_case,
                     int64_t message_bytes);

/// What each stage would like to hold in calm: all that a micro-batch saves, of every micro-batch
/// in flight but the one that runs, and that one's peak.
/// Shapes: graphs by stage of the rank, as in `floor`
std::vector<int64_t> stage_calm_bytes(const RankFloor& floor,
                                      const std::vector<const Graph*>& graphs,
                                      const LayerLoad& balanced);

/// Parts of the budget for the stages of a rank: each its floor, and of the rest as much as it
/// would like to hold beyond that in calm, in proportion. 0 (no limit) stays 0. Requires:
/// budget_bytes is 0 or at least floor.activation_bytes. Shapes:   calm_bytes by stage of the rank
std::vector<int64_t> stage_budgets(const RankFloor& floor, const std::vector<int64_t>& calm_bytes,
                                   int64_t budget_bytes);

/// The load of a layer (of the stage's graph) in a micro-batch.
using LoadOf = std::function<LayerLoad(int stage, int microbatch, int layer)>;

/// Drives a rank without executing anything: every action is replayed. Of votes the rank decides
/// alone.
RankRun replay_rank(const std::vector<RankStage>& stages, const RankOptions& options,
                    const RankProgram& program, const LoadOf& load_of);

}  // namespace bagualu
