#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "bagualu/cost/op_cost.h"
#include "bagualu/provision/rank_flight.h"
#include "bagualu/schedule/dual_batch.h"

namespace bagualu {

/// A stretch of a forward, up to its next gate or its end, and the part of a backward that runs
/// beside it.
struct OverlappedSegment {
  MicrobatchState forward;   ///< after it
  MicrobatchState backward;  ///< after it
  RankTimeline actions;      ///< of both, in the order of issue
  int gate = -1;             ///< the gate it ends at; -1: the end of the forward
};

/// One side of a segment. Owns: nothing.
struct SegmentSide {
  const Graph* graph = nullptr;
  const CostTable* cost = nullptr;
  const Flight* flight = nullptr;
};

/// What becomes of the backward's weight gradients, which are put off.
enum class WeightGrads : uint8_t {
  kFill,   ///< put off to fill gaps, done by the end of the pair of passes
  kLeave,  ///< put off beyond it: a pass of their own follows
};

using OrderSolver = std::function<std::vector<ScheduleItem>(const DualBatchInstance&)>;

/// Builds the segment that follows the forward's last gate under `plan`, with demotions first.
/// The backward's part ends where the pinned order of communication says: per pair of MoE layers
/// combine of the backward, counts and dispatch of the forward, dispatch of the backward, combine
/// of the forward. It depends on the two graphs and on where both stand, so that all ranks of an
/// expert group agree on it whatever their loads; the order of everything else is `solver`'s.
OverlappedSegment overlapped_segment(const SegmentSide& forward, const Plan& plan,
                                     const SegmentSide& backward, WeightGrads weight_grads,
                                     const OrderSolver& solver);

/// The gate that a forward reaches next; -1 if none is left.
int next_gate(const Graph& graph, const MicrobatchState& state);

/// Last op, counting down, of the backward's part in a segment that ends at gate `gate` of the
/// forward (-1: its end); next_backward + 1 if it has none.
int backward_stop(const Graph& backward, int gate, int next_backward);

}  // namespace bagualu
