#include "bagualu/provision/rank_segment.h"

#include <utility>

namespace bagualu {

int backward_stop(const Graph& backward, int gate, int next_backward) {
  if (gate < 0) return 0;
  int pair = 0;
  for (int i = static_cast<int>(backward.ops.size()) - 1; i >= 0; --i) {
    if (backward.ops[i].kind != OpKind::kExperts) continue;
    if (pair++ == gate) return std::min(i, next_backward + 1);
  }
  return 0;
}

OverlappedSegment overlapped_segment(const SegmentSide& forward, const Plan& plan,
                                     const SegmentSide& backward, WeightGrads weight_grads,
                                     const OrderSolver& /*solver*/) {
  OverlappedSegment segment;
  segment.forward = forward.flight->state;
  segment.backward = backward.flight->state;
  Timeline timeline;
  const auto emit = [&](const SegmentSide& side) {
    for (const Action& action : timeline) segment.actions.push_back({side.flight->slot, action});
    timeline.clear();
  };
  append_demotions(*forward.graph, plan, segment.forward, timeline);
  emit(forward);
  int end = 0, gate = -1;
  for (size_t g = 0; g < forward.graph->gates.size(); ++g) {
    if (forward.graph->gates[g].op >= segment.forward.next_op) {
      gate = static_cast<int>(g);
      end = forward.graph->gates[g].op + 1;
      break;
    }
  }
  if (gate < 0) end = static_cast<int>(forward.graph->ops.size());
  if (!segment.backward.in_backward) segment.backward.next_backward = -1;
  const auto next_backward = [&] {
    return segment.backward.in_backward ? segment.backward.next_backward
                                        : static_cast<int>(backward.graph->ops.size()) - 1;
  };
  const int stop = backward_stop(*backward.graph, gate, next_backward());
  const bool split = weight_grads != WeightGrads::kWithInput;
  while (segment.forward.next_op < end ||
         (!segment.backward.backward_done() && next_backward() >= stop)) {
    if (!segment.backward.backward_done() && next_backward() >= stop) {
      append_backward_op(*backward.graph, backward.flight->plan, split, segment.backward, timeline);
      emit(backward);
    }
    if (segment.forward.next_op < end) {
      append_forward_op(*forward.graph, plan, segment.forward, timeline);
      emit(forward);
    }
    if (weight_grads == WeightGrads::kFill && segment.backward.weight_grads.size() > 1) {
      append_weight_grad(*backward.graph, segment.backward, timeline);
      emit(backward);
    }
  }
  segment.gate = gate;
  return segment;
}

}  // namespace bagualu
