#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/cost/op_cost.h"
#include "bagualu/graph/graph.h"
#include "bagualu/schedule/dual_batch.h"
#include "bagualu/schedule/timeline.h"

namespace bagualu {

/// One micro-batch of a segment: its graph with the costs, loads (by layer) and plan, and where it
/// stands. Owns: nothing; all of it outlives the call that it is given to.
struct SegmentBatch {
  const Graph* graph = nullptr;
  const CostTable* cost = nullptr;
  const std::vector<LayerLoad>* loads = nullptr;
  const Plan* plan = nullptr;
  const MicrobatchState* state = nullptr;
};

/// Forward operators [state->next_op, end_op) of one micro-batch. A gate inside (not as the last
/// operator) makes its router a host synchronisation, since the thread reads the counts there.
struct ForwardSegment {
  SegmentBatch batch;
  int end_op = 0;
};

/// Backward operators first_op, first_op - 1, ..., last_op of one micro-batch.
/// first_op == the number of operators - 1: the backward has not begun.
struct BackwardSegment {
  SegmentBatch batch;
  int first_op = -1;
  int last_op = 0;
  bool defer_weight_grads = true;  ///< off: weight gradients count as part of their operator
};

struct SegmentOptions {
  int weight_lag = 2;
  int rebuild_lead = 3;
  /// Neighbours of one chain on one stream become one item: fewer decisions, nearly equal results.
  bool fuse = true;
  /// Pins the communication: needed where the ranks of a group run the same segment, each with its
  /// own loads.
  bool pin_communication = true;
};

/// A dual-batch instance and which operators of the graphs its items are.
struct DualBatchSegment {
  DualBatchInstance instance;
  // By item, operators in the order in which they run.
  std::vector<std::vector<int>> forward_ops;
  std::vector<std::vector<int>> backward_ops;
  std::vector<std::vector<int>> weight_grad_ops;
  std::vector<std::vector<int>> rebuild_ops;  ///< operators whose forward runs again
  /// By rebuild: the operators of its backward item that a rebuild serves, in backward order.
  std::vector<std::vector<int>> rebuild_for;
};

/// Durations come from the cost tables at the loads: comm operators on the comm stream, all others
/// on the compute stream. What the plans give up follows the timelines of schedule/timeline.h:
/// rebuilds are fillers, expert intermediates rebuilt in pieces and encodings are part of their
/// operator, offloads end before the operator behind their drain starts, reloads start behind the
/// operator after which the timeline issues them.
/// Either side may be empty (graph == nullptr or no operators left).
/// Ensures: check_instance() holds.
DualBatchSegment make_segment(const ForwardSegment& forward, const BackwardSegment& backward,
                              const SegmentOptions& options);

/// One operator to issue: kForward and kBackward run (or, on the comm stream, issue) it,
/// kWeightGrad computes its weight gradient, kRebuild rebuilds what backward operator `op` needs.
struct SegmentStep {
  ItemKind kind = ItemKind::kForward;
  int op = -1;
  bool operator==(const SegmentStep&) const = default;
};

/// The operators of an order, one by one. Requires: replay(segment.instance, order) accepts it.
std::vector<SegmentStep> segment_steps(const DualBatchSegment& segment,
                                       const std::vector<ScheduleItem>& order);

}  // namespace bagualu
