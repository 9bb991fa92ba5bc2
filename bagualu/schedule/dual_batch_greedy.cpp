#include "bagualu/schedule/dual_batch_greedy.h"

#include <cstddef>

#include "bagualu/base/error.h"
#include "bagualu/schedule/dual_batch_issue.h"

namespace bagualu {

std::vector<ScheduleItem> greedy_order(const DualBatchInstance& instance,
                                       const PrecedenceTimes& times, IssueState& state) {
  constexpr ItemKind kKinds[] = {ItemKind::kForward, ItemKind::kBackward, ItemKind::kWeightGrad,
                                 ItemKind::kRebuild};
  std::vector<ScheduleItem> order;
  state.reset(instance);
  while (!state.done()) {
    bool found = false;
    ItemKind best = ItemKind::kForward;
    int64_t best_start = 0;
    int64_t best_rest = 0;
    for (ItemKind kind : kKinds) {
      if (!state.can_issue(kind)) continue;
      const int64_t start = state.start_ns(kind);
      const int node = times.node(kind, state.next(kind));
      const int64_t rest = times.ns(node) + times.tail_ns(node);
      if (found && (start > best_start || (start == best_start && rest <= best_rest))) continue;
      found = true;
      best = kind;
      best_start = start;
      best_rest = rest;
    }
    BGL_CHECK(found, order.size());
    order.push_back({best, state.next(best)});
    state.issue(best);
  }
  return order;
}

std::vector<ScheduleItem> greedy_order(const DualBatchInstance& instance) {
  PrecedenceTimes times;
  times.build(instance);
  IssueState state;
  return greedy_order(instance, times, state);
}

}  // namespace bagualu
