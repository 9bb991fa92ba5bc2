#include "bagualu/schedule/dual_batch.h"

#include <algorithm>
#include <array>

#include "bagualu/base/error.h"
#include "bagualu/schedule/dual_batch_issue.h"
#include "bagualu/schedule/dual_batch_solver.h"

namespace bagualu {
namespace {

void check_chain(const std::vector<ChainOp>& chain) {
  for (const ChainOp& op : chain) {
    BGL_CHECK(op.ns >= 0, op.ns);
    BGL_CHECK(op.resource == Resource::kCompute || op.resource == Resource::kComm);
  }
}

// Whether `index` names one of `size` and does not go back behind `last`.
void check_next(int index, int& last, size_t size) {
  BGL_CHECK(index >= std::max(last, 0) && index < static_cast<int>(size), index, last, size);
  last = index;
}

void check_fillers(const DualBatchInstance& instance) {
  int last = 0;
  for (const WeightGradFiller& grad : instance.weight_grads) {
    BGL_CHECK(grad.ns >= 0, grad.ns);
    check_next(grad.after_backward, last, instance.backward.size());
  }
  last = 0;
  for (const RebuildFiller& rebuild : instance.rebuilds) {
    BGL_CHECK(rebuild.ns >= 0, rebuild.ns);
    check_next(rebuild.before_backward, last, instance.backward.size());
  }
  BGL_CHECK(instance.weight_lag >= 0 && instance.rebuild_lead >= 0);
}

void check_copies(const DualBatchInstance& instance) {
  int last = 0;
  for (const CopyOut& copy : instance.copies_out) {
    BGL_CHECK(copy.ns >= 0, copy.ns);
    check_next(copy.source_forward, last, instance.forward.size());
    BGL_CHECK(copy.releases_for_forward < static_cast<int>(instance.forward.size()));
    BGL_CHECK(copy.releases_for_forward < 0 || copy.releases_for_forward > copy.source_forward);
  }
  last = 0;
  int last_freed = -1;
  int last_rebuild = -1;
  for (const CopyIn& copy : instance.copies_in) {
    BGL_CHECK(copy.ns >= 0, copy.ns);
    check_next(copy.wanted_by_backward, last, instance.backward.size());
    BGL_CHECK(copy.not_before_backward >= last_freed && copy.not_before_backward >= -1);
    BGL_CHECK(copy.not_before_backward < copy.wanted_by_backward);
    last_freed = copy.not_before_backward;
    if (copy.wanted_by_rebuild < 0) continue;
    check_next(copy.wanted_by_rebuild, last_rebuild, instance.rebuilds.size());
    const size_t rebuild = static_cast<size_t>(copy.wanted_by_rebuild);
    BGL_CHECK(copy.not_before_backward < instance.rebuilds[rebuild].before_backward);
  }
}

std::vector<int> comm_indices(const std::vector<ChainOp>& chain) {
  std::vector<int> indices;
  for (size_t i = 0; i < chain.size(); ++i) {
    if (chain[i].resource == Resource::kComm) indices.push_back(static_cast<int>(i));
  }
  return indices;
}

void check_comm_order(const DualBatchInstance& instance) {
  if (instance.comm_order.empty()) return;
  const std::array<std::vector<int>, 2> want = {comm_indices(instance.forward),
                                                comm_indices(instance.backward)};
  std::array<size_t, 2> seen{};
  for (const ScheduleItem& item : instance.comm_order) {
    BGL_CHECK(item.kind == ItemKind::kForward || item.kind == ItemKind::kBackward);
    const size_t chain = static_cast<size_t>(item.kind);
    BGL_CHECK(seen[chain] < want[chain].size() && want[chain][seen[chain]] == item.index,
              item.index);
    ++seen[chain];
  }
  BGL_CHECK(seen[0] == want[0].size() && seen[1] == want[1].size(), seen[0], seen[1]);
}

// Communication operators of a chain, one list per layer that has any.
std::vector<std::vector<int>> comm_by_layer(const std::vector<ChainOp>& chain) {
  std::vector<std::vector<int>> layers;
  int layer = 0;
  for (int index : comm_indices(chain)) {
    const int own = chain[static_cast<size_t>(index)].layer;
    if (layers.empty() || own != layer) layers.emplace_back();
    layer = own;
    layers.back().push_back(index);
  }
  return layers;
}

class OrderWriter {
 public:
  explicit OrderWriter(const DualBatchInstance& instance) : instance_(instance) {}

  void forward_until(int end) {
    while (forward_ < end) order_.push_back({ItemKind::kForward, forward_++});
  }
  void backward_until(int end) {
    for (; backward_ < end; ++backward_) {
      while (rebuild_ < static_cast<int>(instance_.rebuilds.size()) &&
             instance_.rebuilds[static_cast<size_t>(rebuild_)].before_backward == backward_) {
        order_.push_back({ItemKind::kRebuild, rebuild_++});
      }
      order_.push_back({ItemKind::kBackward, backward_});
      while (grad_ < static_cast<int>(instance_.weight_grads.size()) &&
             instance_.weight_grads[static_cast<size_t>(grad_)].after_backward == backward_) {
        order_.push_back({ItemKind::kWeightGrad, grad_++});
      }
    }
  }
  std::vector<ScheduleItem> finish() {
    backward_until(static_cast<int>(instance_.backward.size()));
    forward_until(static_cast<int>(instance_.forward.size()));
    return std::move(order_);
  }

 private:
  const DualBatchInstance& instance_;
  std::vector<ScheduleItem> order_;
  int forward_ = 0;
  int backward_ = 0;
  int rebuild_ = 0;
  int grad_ = 0;
};

}  // namespace

void check_instance(const DualBatchInstance& instance) {
  check_chain(instance.forward);
  check_chain(instance.backward);
  check_fillers(instance);
  check_copies(instance);
  check_comm_order(instance);
}

std::vector<ScheduleItem> pinned_comm_order(const DualBatchInstance& instance) {
  const auto forward = comm_by_layer(instance.forward);
  const auto backward = comm_by_layer(instance.backward);
  std::vector<ScheduleItem> order;
  const auto add = [&](ItemKind kind, const std::vector<int>& layer, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) order.push_back({kind, layer[i]});
  };
  const std::vector<int> none;
  for (size_t pair = 0; pair < std::max(forward.size(), backward.size()); ++pair) {
    const std::vector<int>& f = pair < forward.size() ? forward[pair] : none;
    const std::vector<int>& b = pair < backward.size() ? backward[pair] : none;
    const size_t first = (b.size() + 1) / 2;
    const size_t last = f.empty() ? 0 : f.size() - 1;
    add(ItemKind::kBackward, b, 0, first);
    add(ItemKind::kForward, f, 0, last);
    add(ItemKind::kBackward, b, first, b.size());
    add(ItemKind::kForward, f, last, f.size());
  }
  return order;
}

std::vector<ScheduleItem> fixed_order(const DualBatchInstance& instance) {
  const std::vector<ScheduleItem> comm =
      instance.comm_order.empty() ? pinned_comm_order(instance) : instance.comm_order;
  OrderWriter writer(instance);
  for (const ScheduleItem& item : comm) {
    if (item.kind == ItemKind::kForward) writer.forward_until(item.index + 1);
    if (item.kind == ItemKind::kBackward) writer.backward_until(item.index + 1);
  }
  return writer.finish();
}

std::vector<ScheduleItem> sequential_order(const DualBatchInstance& instance) {
  OrderWriter writer(instance);
  return writer.finish();
}

DualBatchReplay replay(const DualBatchInstance& instance, const std::vector<ScheduleItem>& order) {
  IssueState state;
  issue_all(instance, order, state);
  const auto copy = [](std::span<const TimeSpan> spans) {
    return std::vector<TimeSpan>(spans.begin(), spans.end());
  };
  return {copy(state.spans(ItemKind::kForward)),
          copy(state.spans(ItemKind::kBackward)),
          copy(state.spans(ItemKind::kWeightGrad)),
          copy(state.spans(ItemKind::kRebuild)),
          copy(state.copies_out()),
          copy(state.copies_in()),
          state.makespan_ns()};
}

DualBatchSchedule solve(const DualBatchInstance& instance, const SolveOptions& options) {
  DualBatchSolver solver;
  return solver.solve(instance, options);
}

}  // namespace bagualu
