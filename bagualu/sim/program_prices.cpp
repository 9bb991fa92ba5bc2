#include <algorithm>
#include <functional>
#include <utility>

#include "bagualu/cost/op_flops.h"
#include "bagualu/cost/residency_pricing.h"
#include "bagualu/sim/program_recorder_impl.h"

namespace bagualu {
namespace {

OpTime map_points(const OpTime& time, const std::function<int64_t(int64_t)>& change) {
  OpTime changed = time;
  for (auto& [x, ns] : changed.points) ns = change(ns);
  return changed;
}

OpTime sum_of(const OpTime& a, const OpTime& b) {
  std::vector<int64_t> at;
  for (const OpTime* time : {&a, &b}) {
    for (const auto& [x, ns] : time->points) at.push_back(x);
  }
  std::sort(at.begin(), at.end());
  at.erase(std::unique(at.begin(), at.end()), at.end());
  OpTime sum;
  sum.measured = a.measured && b.measured;
  for (const int64_t x : at) sum.points.emplace_back(x, a.eval(x) + b.eval(x));
  return sum;
}

}  // namespace

// ---- bytes ----

void ProgramRecorder::Impl::add_passing(const ByteFormula& formula, int32_t cell) {
  writer_.at_start().add(formula, cell, 1, graph().tokens);
  writer_.at_end().add(formula, cell, -1, graph().tokens);
}

void ProgramRecorder::Impl::add_piece(int storage) {
  if (is_materialised(graph(), *plan_, storage)) return;
  add_passing(graph().storages[static_cast<size_t>(storage)].piece_bytes, cell_of_storage(storage));
}

void ProgramRecorder::Impl::add_workspace(const Workspace& workspace, int32_t cell) {
  const std::vector<ByteFormula>* largest = nullptr;
  int64_t most = -1;
  for (const auto& phase : workspace.phases) {
    int64_t sum = 0;
    for (const ByteFormula& formula : phase) sum += formula.eval(graph().tokens, load(cell));
    if (sum <= most) continue;
    most = sum;
    largest = &phase;
  }
  if (largest != nullptr) {
    for (const ByteFormula& formula : *largest) add_passing(formula, cell);
  }
  writer_.at_start().add(workspace.hidden_bytes);
  writer_.at_end().add(-workspace.hidden_bytes);
}

void ProgramRecorder::Impl::create(const OpSpec& op) {
  for (int s : op.creates) {
    if (is_materialised(graph(), *plan_, s)) add_storage(writer_.at_start(), s, 1);
    add_piece(s);
  }
}

void ProgramRecorder::Impl::create_gradients(const OpSpec& op, bool split) {
  for (int s : op.bwd_creates) {
    if (split || !graph().storages[static_cast<size_t>(s)].deferred_only) {
      add_storage(writer_.at_start(), s, 1);
    }
  }
  for (int s : op.bwd_saved) add_piece(s);
}

// Outputs that are still held somewhere are written once more and thrown away.
void ProgramRecorder::Impl::make_again(const OpSpec& op) {
  for (int s : op.creates) {
    const StorageSpec& spec = graph().storages[static_cast<size_t>(s)];
    const bool dropped =
        spec.unit < 0 ||
        residencies()[plan_->residency[static_cast<size_t>(spec.unit)]].retire == Retire::kDrop;
    if (dropped) {
      add_storage(writer_.at_start(), s, 1);
    } else {
      add_passing(spec.bytes, cell_of_storage(s));
    }
  }
}

void ProgramRecorder::Impl::bytes_of_pass(const Action& action) {
  const OpSpec& op = graph().ops[static_cast<size_t>(action.id)];
  const int32_t cell = cell_of_op(action.id);
  switch (action.kind) {
    case ActionKind::kForward:
      create(op);
      return add_workspace(op.fwd_workspace, cell);
    case ActionKind::kRecompute:
      make_again(op);
      return add_workspace(op.fwd_workspace, cell);
    case ActionKind::kBackward:
      create_gradients(op, false);
      return add_workspace(op.bwd_workspace, cell);
    case ActionKind::kInputGrad:
      create_gradients(op, true);
      return add_workspace(op.input_grad_workspace, cell);
    default:
      return add_workspace(op.wgrad_workspace, cell);
  }
}

int64_t ProgramRecorder::Impl::encoded_bytes(int storage) const {
  const auto at = static_cast<size_t>(storage);
  const std::vector<LayerLoad> loads(static_cast<size_t>(graph().layers),
                                     load(cell_of_storage(storage)));
  return memory_table(graph(), loads).encoded_bytes[at];
}

// ---- times ----

int32_t ProgramRecorder::Impl::time_of(const Action& action) {
  const OpSpec& op = graph().ops[static_cast<size_t>(action.id)];
  std::vector<int> rebuilt;  // units, inside the backward
  if (action.kind == ActionKind::kBackward || action.kind == ActionKind::kInputGrad) {
    for (int s : op.bwd_saved) {
      if (!is_materialised(graph(), *plan_, s)) {
        rebuilt.push_back(graph().storages[static_cast<size_t>(s)].unit);
      }
    }
  }
  if (rebuilt.empty()) return base_time(action);
  const auto kind = static_cast<int>(action.kind);
  const auto [found, added] =
      piece_times_.try_emplace({of_->stage * 64 + kind, action.id, rebuilt});
  if (added) {
    OpTime sum = op_time(action);
    for (int unit : rebuilt) sum = sum_of(sum, of_->cost->rebuild[static_cast<size_t>(unit)]);
    found->second = writer_.time(std::move(sum));
  }
  return found->second;
}

int32_t ProgramRecorder::Impl::base_time(const Action& action) {
  int32_t& known = of_->times[static_cast<size_t>(action.kind)][static_cast<size_t>(action.id)];
  if (known < 0) known = writer_.time(op_time(action));
  return known;
}

// As make_segment() prices them, at every load.
OpTime ProgramRecorder::Impl::op_time(const Action& action) const {
  const auto at = static_cast<size_t>(action.id);
  const OpSpec& op = graph().ops[at];
  const bool forward = action.kind == ActionKind::kForward || action.kind == ActionKind::kRecompute;
  OpTime time = forward ? of_->cost->forward[at] : of_->cost->backward[at];
  if (!scales_with_rows(op.kind)) time.points = {{0, time.eval(graph().tokens)}};
  if (action.kind == ActionKind::kWeightGrad) {
    return map_points(time, [](int64_t ns) { return ns / 2; });
  }
  if (action.kind == ActionKind::kInputGrad && op.has_wgrad) {
    return map_points(time, [](int64_t ns) { return ns - ns / 2; });
  }
  return time;
}

}  // namespace bagualu
