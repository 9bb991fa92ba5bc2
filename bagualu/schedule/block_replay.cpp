#include "bagualu/schedule/block_replay.h"

#include <algorithm>
#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {
BlockReplay::BlockReplay(const Graph& graph, const LoadDependence& dependence, Plan plan,
                         Timeline timeline)
    : graph_(graph), plan_(std::move(plan)), timeline_(std::move(timeline)) {
  cut();
  find_layers(dependence);
}

void BlockReplay::cut() {
  first_block_.assign(graph_.gates.size() + 1, -1);
  first_block_[0] = 0;
  int layer = -2;
  bool backward = false, after_gate = false;
  first_backward_block_ = -1;
  for (size_t i = 0; i < timeline_.size(); ++i) {
    const Action& action = timeline_[i];
    const bool op = action.kind == ActionKind::kForward || action.kind == ActionKind::kBackward;
    const bool turns = action.kind == ActionKind::kBackward && !backward;
    if (i == 0 || after_gate || turns || (op && graph_.ops[action.id].layer != layer)) {
      begin_.push_back(i);
    }
    if (turns) first_backward_block_ = static_cast<int>(begin_.size()) - 1;
    if (op) layer = graph_.ops[action.id].layer;
    backward = backward || turns;
    after_gate = action.kind == ActionKind::kGate;
    if (!after_gate) continue;
    for (size_t g = 0; g < graph_.gates.size(); ++g) {
      if (graph_.gates[g].layer == action.id) {
        first_block_[g + 1] = static_cast<int>(begin_.size());
      }
    }
  }
  spans_.resize(begin_.size());
  begin_.push_back(timeline_.size());
}

void BlockReplay::find_layers(const LoadDependence& dependence) {
  blocks_of_layer_.resize(static_cast<size_t>(graph_.layers));
  for (int b = 0; b < static_cast<int>(spans_.size()); ++b) {
    std::vector<uint8_t> seen(static_cast<size_t>(graph_.layers));
    const auto mark = [&](int layer, bool depends) {
      if (depends) seen[static_cast<size_t>(layer)] = 1;
    };
    const auto mark_storages = [&](const std::vector<int>& storages) {
      for (int s : storages) mark(graph_.storages[s].layer, dependence.storage_depends[s] != 0);
    };
    for (size_t i = begin_[b]; i < begin_[b + 1]; ++i) {
      const Action& action = timeline_[i];
      if (action.kind == ActionKind::kGate) continue;
      if (!names_op(action.kind)) {
        mark(graph_.storages[action.id].layer, dependence.storage_depends[action.id] != 0);
        continue;
      }
      const OpSpec& op = graph_.ops[action.id];
      mark(op.layer, dependence.op_depends[action.id] != 0);
      mark_storages(op.creates);
      mark_storages(op.bwd_creates);
      mark_storages(op.bwd_saved);
    }
    for (size_t layer = 0; layer < seen.size(); ++layer) {
      if (seen[layer]) blocks_of_layer_[layer].push_back(b);
    }
  }
}

void BlockReplay::update_layer(const MemoryTable& table, int layer) {
  for (int b : blocks_of_layer_[static_cast<size_t>(layer)]) {
    spans_[b] = replay_span(graph_, plan_, table, timeline_, begin_[b], begin_[b + 1]);
  }
}

void BlockReplay::update_all(const MemoryTable& table) {
  for (size_t b = 0; b < spans_.size(); ++b) {
    spans_[b] = replay_span(graph_, plan_, table, timeline_, begin_[b], begin_[b + 1]);
  }
}

BlockReplay::Peak BlockReplay::peak_from(int block, int64_t live_bytes, int64_t host_live_bytes,
                                         int64_t turn_bytes, int64_t backward_shift_bytes) const {
  Peak peak{live_bytes, host_live_bytes};
  for (int b = block; b < static_cast<int>(spans_.size()); ++b) {
    if (b == first_backward_block_) {
      peak.bytes = std::max(peak.bytes, live_bytes + turn_bytes);
      live_bytes += backward_shift_bytes;
    }
    peak.bytes = std::max(peak.bytes, live_bytes + spans_[b].high_bytes);
    peak.host_bytes = std::max(peak.host_bytes, host_live_bytes + spans_[b].host_high_bytes);
    live_bytes += spans_[b].net_bytes;
    host_live_bytes += spans_[b].host_net_bytes;
  }
  return peak;
}

}  // namespace bagualu
