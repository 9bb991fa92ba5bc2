#include "bagualu/schedule/dual_batch_greedy.h"

#include <cstddef>

#include "bagualu/base/error.h"
#include "bagualu/schedule/dual_batch_issue.h"

namespace bagualu {
namespace {

// By index: time from its start to the end of its chain.
std::vector<int64_t> tails(const std::vector<ChainOp>& chain) {
  std::vector<int64_t> tail(chain.size() + 1, 0);
  for (size_t i = chain.size(); i-- > 0;) tail[i] = tail[i + 1] + chain[i].ns;
  return tail;
}

}  // namespace

std::vector<ScheduleItem> greedy_order(const DualBatchInstance& instance) {
  const std::vector<int64_t> forward_tail = tails(instance.forward);
  const std::vector<int64_t> backward_tail = tails(instance.backward);
  std::vector<ScheduleItem> order;
  IssueState state;
  state.reset(instance);
  while (!state.done()) {
    bool found = false;
    ItemKind best = ItemKind::kForward;
    int64_t best_start = 0;
    int64_t best_tail = 0;
    for (ItemKind kind :
         {ItemKind::kForward, ItemKind::kBackward, ItemKind::kWeightGrad, ItemKind::kRebuild}) {
      if (!state.can_issue(kind)) continue;
      const int64_t start = state.start_ns(kind);
      const size_t next = static_cast<size_t>(state.next(kind));
      int64_t tail = 0;
      if (kind == ItemKind::kForward) tail = forward_tail[next];
      if (kind == ItemKind::kBackward) tail = backward_tail[next];
      if (kind == ItemKind::kRebuild) {
        tail = backward_tail[static_cast<size_t>(instance.rebuilds[next].before_backward)];
      }
      if (found && (start > best_start || (start == best_start && tail <= best_tail))) continue;
      found = true;
      best = kind;
      best_start = start;
      best_tail = tail;
    }
    BGL_CHECK(found, order.size());
    order.push_back({best, state.next(best)});
    state.issue(best);
  }
  return order;
}

}  // namespace bagualu
