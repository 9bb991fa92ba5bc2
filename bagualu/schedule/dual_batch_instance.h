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

/// Forward operators [state->next_op, end_op) of one micro-batch. A router inside (not as the last
/// operator) becomes a host synchronisation, since the thread reads the counts there.
struct ForwardSegment {
  SegmentBatch batch;
  int end_op = 0;
};

/// Backward operators of one micro-batch, from where it stands down to last_op.
struct BackwardSegment {
  SegmentBatch batch;
  int last_op = 0;
  bool split = true;  ///< off: weight gradients are part of their operator
  bool fill = true;   ///< off: they come after the segment and are no part of it
};

struct SegmentOptions {
  int weight_lag = 2;
  int rebuild_lead = 3;
  /// Neighbours of one chain on the compute stream become one item: fewer decisions, nearly equal
  /// results.
  bool fuse = true;
};

/// A dual-batch instance and which operators of the graphs its items are.
struct DualBatchSegment {
  DualBatchInstance instance;
  // By item, in the order in which they run.
  std::vector<std::vector<int>> forward_ops;
  std::vector<std::vector<int>> backward_ops;
  /// Weight gradients that the state has put off come first.
  std::vector<std::vector<int>> weight_grad_ops;
  std::vector<std::vector<int>> rebuild_storages;  ///< dropped storages that it brings back
};

/// Durations come from the cost tables at the loads: operators of Stream::kComm are communication,
/// all others compute. What the plans give up follows the timelines of schedule/timeline.h:
/// rebuilds are fillers, expert intermediates rebuilt in pieces and encodings are part of their
/// operator, offloads end before the operator behind their drain starts, reloads start behind the
/// operator after which the timeline issues them. Copies that are under way when the segment begins
/// are left out. The order of communication is pinned to one that depends on the two graphs and on
/// where both micro-batches stand, never on durations, so that ranks with other loads agree: per
/// pair of MoE layers combine of the backward, dispatch of the forward, dispatch of the backward,
/// combine of the forward; receives of neighbouring stages before, sends behind. Either side may be
/// empty: graph == nullptr, or no operators left. Ensures: check_instance() holds.
DualBatchSegment make_segment(const ForwardSegment& forward, const BackwardSegment& backward,
                              const SegmentOptions& options = {});

/// One call of an appender of schedule/timeline.h: kForward and kBackward append the micro-batch's
/// next operator, kWeightGrad its oldest weight gradient, kRebuild makes a storage again.
struct SegmentStep {
  ItemKind kind = ItemKind::kForward;
  int id = -1;  ///< operator; kRebuild: storage
  bool operator==(const SegmentStep&) const = default;
};

/// The steps of an order, one by one. A rebuild whose turn is just before its operator is one too.
/// Requires: replay(segment.instance, order) accepts it.
std::vector<SegmentStep> segment_steps(const DualBatchSegment& segment,
                                       const std::vector<ScheduleItem>& order);

/// Share of an operator's backward that is its weight gradient: both gradients of a matrix product
/// are products of the same size.
int64_t weight_grad_ns(const CostTable& cost, const Graph& graph, int op, const LayerLoad& load);

/// The same order with every communication issued as soon as its chain, the communicator and the
/// windows allow. Ends no later; for runtimes whose issuing thread computes, and so delays whatever
/// it issues behind a long operator.
std::vector<ScheduleItem> communication_first(const DualBatchInstance& instance,
                                              const std::vector<ScheduleItem>& order);

}  // namespace bagualu
