#include "bagualu/provision/rank_segment.h"

#include <algorithm>

#include "bagualu/schedule/dual_batch_instance.h"

namespace bagualu {

int next_gate(const Graph& graph, const MicrobatchState& state) {
  for (size_t g = 0; g < graph.gates.size(); ++g) {
    if (graph.gates[g].op >= state.next_op) return static_cast<int>(g);
  }
  return -1;
}

int backward_stop(const Graph& backward, int gate, int next_backward) {
  if (gate < 0) return 0;
  int pair = 0;
  for (int i = static_cast<int>(backward.ops.size()) - 1; i >= 0; --i) {
    // The last of the experts' operators: one in the native profile, three in the megatron one.
    const OpKind kind = backward.ops[i].kind;
    if (kind != OpKind::kExperts && kind != OpKind::kExpertFc2) continue;
    if (pair++ != gate) continue;
    // Behind the issue of combine, so that the experts' backward is left to run beside the
    // forward's dispatch, which nothing else of this layer pair could. What puts rows in the
    // senders' order waits for combine too.
    const bool sorts = backward.ops[i + 1].kind == OpKind::kDispatchUnpack;
    return std::min(i + (sorts ? 2 : 1), next_backward + 1);
  }
  return 0;
}

namespace {

// Appends a segment's steps, each for the micro-batch that it belongs to.
class Writer {
 public:
  Writer(const SegmentSide& forward, const Plan& plan, const SegmentSide& backward,
         OverlappedSegment& segment)
      : forward_(forward), plan_(plan), backward_(backward), segment_(segment) {}

  void demotions() {
    append_demotions(*forward_.graph, plan_, segment_.forward, timeline_);
    keep(forward_);
  }

  void step(const SegmentStep& step) {
    MicrobatchState& state = segment_.backward;
    const Plan& plan = backward_.flight->plan;
    switch (step.kind) {
      case ItemKind::kForward:
        append_forward_op(*forward_.graph, plan_, segment_.forward, timeline_);
        return keep(forward_);
      case ItemKind::kBackward:
        append_backward_op(*backward_.graph, plan, /*split=*/true, state, timeline_);
        break;
      case ItemKind::kWeightGrad:
        append_weight_grad(*backward_.graph, state, timeline_);
        break;
      case ItemKind::kRebuild:
        append_rebuild(*backward_.graph, plan, step.id, state, timeline_);
        break;
    }
    keep(backward_);
  }

 private:
  void keep(const SegmentSide& side) {
    for (const Action& action : timeline_) {
      segment_.actions.push_back({side.flight->slot, action});
    }
    timeline_.clear();
  }

  const SegmentSide& forward_;
  const Plan& plan_;
  const SegmentSide& backward_;
  OverlappedSegment& segment_;
  Timeline timeline_;
};

}  // namespace

OverlappedSegment overlapped_segment(const SegmentSide& forward, const Plan& plan,
                                     const SegmentSide& backward, WeightGrads weight_grads,
                                     const OrderSolver& solver) {
  OverlappedSegment segment;
  segment.forward = forward.flight->state;
  segment.backward = backward.flight->state;
  Writer writer(forward, plan, backward, segment);
  writer.demotions();
  segment.gate = next_gate(*forward.graph, segment.forward);
  const auto ops = [](const Graph& graph) { return static_cast<int>(graph.ops.size()); };
  const int end_op = segment.gate < 0
                         ? ops(*forward.graph)
                         : forward.graph->gates[static_cast<size_t>(segment.gate)].op + 1;
  const int next_backward =
      segment.backward.in_backward ? segment.backward.next_backward : ops(*backward.graph) - 1;
  const Flight& of = *forward.flight;
  const Flight& beside = *backward.flight;
  const DualBatchSegment both =
      make_segment({{forward.graph, forward.cost, &of.loads, &plan, &segment.forward}, end_op},
                   {{backward.graph, backward.cost, &beside.loads, &beside.plan, &segment.backward},
                    backward_stop(*backward.graph, segment.gate, next_backward),
                    /*split=*/true,
                    weight_grads == WeightGrads::kFill});
  const std::vector<ScheduleItem> order = communication_first(both.instance, solver(both.instance));
  for (const SegmentStep& step : segment_steps(both, order)) writer.step(step);
  return segment;
}

}  // namespace bagualu
