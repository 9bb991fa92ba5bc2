#include "bagualu/schedule/replay.h"

#include <algorithm>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"

namespace bagualu {
namespace {

// Of the registered encoding; the runtime has one codec (runtime/ops/quantise.h).
int64_t encoded_size(int64_t bytes, int64_t lossy_element_bytes) {
  for (const ResidencySpec& residency : residencies()) {
    if (residency.retire == Retire::kEncode) {
      return round_up(residency.device_bytes(bytes, lossy_element_bytes), kAllocationGranularity);
    }
  }
  return bytes;
}

void fill_storage(const Graph& graph, size_t s, const LayerLoad& load, MemoryTable& table) {
  table.storage_bytes[s] = graph.storages[s].bytes.eval(graph.tokens, load);
  table.piece_bytes[s] = graph.storages[s].piece_bytes.eval(graph.tokens, load);
  table.encoded_bytes[s] =
      encoded_size(table.storage_bytes[s], graph.storages[s].lossy_element_bytes);
}

void fill_op(const Graph& graph, size_t i, const LayerLoad& load, MemoryTable& table) {
  table.fwd_workspace[i] = graph.ops[i].fwd_workspace.eval(graph.tokens, load);
  table.bwd_workspace[i] = graph.ops[i].bwd_workspace.eval(graph.tokens, load);
  table.input_grad_workspace[i] = graph.ops[i].input_grad_workspace.eval(graph.tokens, load);
  table.wgrad_workspace[i] = graph.ops[i].wgrad_workspace.eval(graph.tokens, load);
}

class Walker {
 public:
  Walker(const Graph& graph, const Plan& plan, const MemoryTable& table, MemoryReplay& replay)
      : graph_(graph), plan_(plan), table_(table), replay_(replay) {}

  // Returns: the highest live value inside the action.
  int64_t step(const Action& action) {
    const int id = action.id;
    switch (action.kind) {
      case ActionKind::kForward:
        return run(create(graph_.ops[id].creates), forward_workspace(id));
      case ActionKind::kRecompute:
        return run_again(graph_.ops[id], table_.fwd_workspace[id]);
      case ActionKind::kBackward:
        return run(create_gradients(id, false), backward_workspace(id, table_.bwd_workspace));
      case ActionKind::kInputGrad:
        return run(create_gradients(id, true), backward_workspace(id, table_.input_grad_workspace));
      case ActionKind::kWeightGrad:
        return run(0, table_.wgrad_workspace[id]);
      case ActionKind::kFree:
      case ActionKind::kDrop:
        replay_.live_bytes -= table_.storage_bytes[id];
        return replay_.live_bytes;
      case ActionKind::kOffload:
        replay_.host_live_bytes += table_.storage_bytes[id];
        replay_.host_peak_bytes = std::max(replay_.host_peak_bytes, replay_.host_live_bytes);
        return replay_.live_bytes;
      case ActionKind::kDrain:
        replay_.live_bytes -= table_.storage_bytes[id];
        return replay_.live_bytes;
      case ActionKind::kReload:
        return run(table_.storage_bytes[id], 0);
      case ActionKind::kAwait:
        replay_.host_live_bytes -= table_.storage_bytes[id];
        return replay_.live_bytes;
      case ActionKind::kEncode:
        return exchange(table_.encoded_bytes[id], table_.storage_bytes[id]);
      case ActionKind::kDecode:
        return exchange(table_.storage_bytes[id], table_.encoded_bytes[id]);
      case ActionKind::kGate:
      case ActionKind::kForwardEnd:
      case ActionKind::kBackwardEnd:
        return replay_.live_bytes;
    }
    throw InternalError("unknown action");
  }

 private:
  int64_t run(int64_t created, int64_t workspace) {
    replay_.live_bytes += created;
    return replay_.live_bytes + workspace;
  }

  // Outputs that are still held somewhere are written once more and thrown away.
  int64_t run_again(const OpSpec& op, int64_t workspace) {
    int64_t made = 0, thrown_away = 0;
    for (int s : op.creates) {
      const int unit = graph_.storages[s].unit;
      const bool dropped = unit < 0 || residencies()[plan_.residency[unit]].retire == Retire::kDrop;
      (dropped ? made : thrown_away) += table_.storage_bytes[s];
    }
    return run(made, workspace + thrown_away);
  }

  int64_t exchange(int64_t made, int64_t returned) {
    replay_.live_bytes += made;
    const int64_t high = replay_.live_bytes;
    replay_.live_bytes -= returned;
    return high;
  }

  int64_t create(const std::vector<int>& storages) const {
    int64_t sum = 0;
    for (int s : storages) {
      if (is_materialised(graph_, plan_, s)) sum += table_.storage_bytes[s];
    }
    return sum;
  }

  int64_t create_gradients(int op, bool split) const {
    int64_t sum = 0;
    for (int s : graph_.ops[op].bwd_creates) {
      if (split || !graph_.storages[s].deferred_only) sum += table_.storage_bytes[s];
    }
    return sum;
  }

  int64_t pieces(const std::vector<int>& storages) const {
    int64_t sum = 0;
    for (int s : storages) {
      if (!is_materialised(graph_, plan_, s)) sum += table_.piece_bytes[s];
    }
    return sum;
  }

  int64_t forward_workspace(int op) const {
    return table_.fwd_workspace[op] + pieces(graph_.ops[op].creates);
  }
  int64_t backward_workspace(int op, const std::vector<int64_t>& workspace) const {
    return workspace[op] + pieces(graph_.ops[op].bwd_saved);
  }

  const Graph& graph_;
  const Plan& plan_;
  const MemoryTable& table_;
  MemoryReplay& replay_;
};

}  // namespace

MemoryTable memory_table(const Graph& graph, const std::vector<LayerLoad>& loads) {
  MemoryTable table;
  table.storage_bytes.resize(graph.storages.size());
  table.piece_bytes.resize(graph.storages.size());
  table.encoded_bytes.resize(graph.storages.size());
  table.fwd_workspace.resize(graph.ops.size());
  table.bwd_workspace.resize(graph.ops.size());
  table.input_grad_workspace.resize(graph.ops.size());
  table.wgrad_workspace.resize(graph.ops.size());
  for (size_t s = 0; s < graph.storages.size(); ++s) {
    fill_storage(graph, s, graph.load_of(graph.storages[s].layer, loads), table);
  }
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    fill_op(graph, i, graph.load_of(graph.ops[i].layer, loads), table);
  }
  return table;
}

LoadDependence::LoadDependence(const Graph& graph)
    : storages(static_cast<size_t>(graph.layers)),
      ops(static_cast<size_t>(graph.layers)),
      storage_depends(graph.storages.size()),
      op_depends(graph.ops.size()) {
  const auto depends = [](const ByteFormula& bytes) {
    return bytes.per_row != 0 || bytes.per_piece_row != 0;
  };
  for (size_t s = 0; s < graph.storages.size(); ++s) {
    const StorageSpec& spec = graph.storages[s];
    if (spec.layer < 0 || (!depends(spec.bytes) && !depends(spec.piece_bytes))) continue;
    storage_depends[s] = 1;
    storages[static_cast<size_t>(spec.layer)].push_back(static_cast<int>(s));
  }
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    const OpSpec& op = graph.ops[i];
    if (op.layer < 0) continue;
    for (const Workspace* workspace :
         {&op.fwd_workspace, &op.bwd_workspace, &op.input_grad_workspace, &op.wgrad_workspace}) {
      for (const auto& phase : workspace->phases) {
        for (const ByteFormula& bytes : phase) op_depends[i] |= depends(bytes) ? 1 : 0;
      }
    }
    if (op_depends[i]) ops[static_cast<size_t>(op.layer)].push_back(static_cast<int>(i));
  }
}

void update_layer(const Graph& graph, const LoadDependence& dependence, int layer,
                  const LayerLoad& load, MemoryTable& table) {
  for (int s : dependence.storages[static_cast<size_t>(layer)]) {
    fill_storage(graph, static_cast<size_t>(s), load, table);
  }
  for (int i : dependence.ops[static_cast<size_t>(layer)]) {
    fill_op(graph, static_cast<size_t>(i), load, table);
  }
}

void replay_memory(const Graph& graph, const Plan& plan, const MemoryTable& table,
                   const Timeline& timeline, size_t begin, MemoryReplay& replay) {
  Walker walker(graph, plan, table, replay);
  replay.peak_action = -1;
  for (size_t i = begin; i < timeline.size(); ++i) {
    const int64_t high = walker.step(timeline[i]);
    if (high > replay.peak_bytes) {
      replay.peak_bytes = high;
      replay.peak_action = static_cast<int>(i);
    }
  }
}

int64_t replay_action(const Graph& graph, const Plan& plan, const MemoryTable& table,
                      const Action& action, MemoryReplay& replay) {
  const int64_t high = Walker(graph, plan, table, replay).step(action);
  replay.peak_bytes = std::max(replay.peak_bytes, high);
  return high;
}

void replay_profile(const Graph& graph, const Plan& plan, const MemoryTable& table,
                    const Timeline& timeline, MemoryReplay& replay,
                    std::vector<int64_t>& high_bytes) {
  Walker walker(graph, plan, table, replay);
  replay.peak_action = -1;
  high_bytes.resize(timeline.size());
  for (size_t i = 0; i < timeline.size(); ++i) {
    high_bytes[i] = walker.step(timeline[i]);
    if (high_bytes[i] > replay.peak_bytes) {
      replay.peak_bytes = high_bytes[i];
      replay.peak_action = static_cast<int>(i);
    }
  }
}

ReplaySpan replay_span(const Graph& graph, const Plan& plan, const MemoryTable& table,
                       const Timeline& timeline, size_t begin, size_t end) {
  MemoryReplay replay;
  replay.host_peak_bytes = INT64_MIN;
  Walker walker(graph, plan, table, replay);
  ReplaySpan span;
  span.high_bytes = span.host_high_bytes = INT64_MIN;
  for (size_t i = begin; i < end; ++i) {
    span.high_bytes = std::max(span.high_bytes, walker.step(timeline[i]));
  }
  span.net_bytes = replay.live_bytes;
  span.host_net_bytes = replay.host_live_bytes;
  span.host_high_bytes = std::max(replay.host_peak_bytes, replay.host_live_bytes);
  return span;
}

std::vector<MemoryPoint> memory_profile(const Graph& graph, const Plan& plan,
                                        const MemoryTable& table, const Timeline& timeline) {
  MemoryReplay replay;
  Walker walker(graph, plan, table, replay);
  std::vector<MemoryPoint> points;
  points.reserve(timeline.size());
  for (const Action& action : timeline) {
    const int64_t high = walker.step(action);
    points.push_back({replay.live_bytes, high});
  }
  return points;
}

}  // namespace bagualu
