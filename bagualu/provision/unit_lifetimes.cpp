#include "bagualu/provision/unit_lifetimes.h"

#include <algorithm>

namespace bagualu {

UnitLifetimes::UnitLifetimes(const Graph& graph)
    : graph_(graph),
      ops_(static_cast<int>(graph.ops.size())),
      lazy_drain_point_(graph.ops.size()),
      first_backward_point_(graph.storages.size(), 2 * ops_),
      prefetch_point_(graph.storages.size(), 2 * ops_) {
  // Mirrors the drain points of timeline.cpp: before a layer's first norm, after its router.
  for (int i = 0; i < ops_; ++i) {
    int points_left = 2;
    int at = ops_;  // backward drains everything
    for (int j = i; j < ops_ && points_left > 0; ++j) {
      const OpKind kind = graph.ops[j].kind;
      const bool before = j > i && (kind == OpKind::kAttnNorm || kind == OpKind::kFinalNorm);
      if ((before || kind == OpKind::kRouter) && --points_left == 0) at = before ? j : j + 1;
    }
    lazy_drain_point_[i] = at;
  }
  int entry_of_layer_above = 2 * ops_;  // nothing is above the head: no prefetch there
  int entry = ops_;
  for (int i = ops_ - 1; i >= 0; --i) {
    const int point = 2 * ops_ - 1 - i;
    if (i + 1 < ops_ && graph.ops[i].layer != graph.ops[i + 1].layer) {
      entry_of_layer_above = entry;
      entry = point;
    }
    for (int s : graph.ops[i].bwd_saved) {
      if (first_backward_point_[s] < 2 * ops_) continue;
      first_backward_point_[s] = point;
      prefetch_point_[s] = std::min(point, entry_of_layer_above);
    }
  }
}

bool UnitLifetimes::decided(int unit, const MicrobatchState& state) const {
  for (int s : graph_.units[unit].storages) {
    const StorageFate fate = state.storage[s];
    if (fate != StorageFate::kAbsent && fate != StorageFate::kLive) return true;
  }
  return false;
}

bool UnitLifetimes::retired(int unit, const MicrobatchState& state) const {
  for (int s : graph_.units[unit].storages) {
    if (state.storage[s] == StorageFate::kLive && graph_.last_forward_read[s] < state.next_op) {
      return true;
    }
  }
  return false;
}

// An expert intermediate that is dropped never exists as a whole: in both passes its piece buffer
// stands in for it.
void UnitLifetimes::append_pieces(int storage, const MicrobatchState& state,
                                  const MemoryTable& table,
                                  std::vector<CoverSegment>& segments) const {
  const int64_t bytes = table.storage_bytes[storage];
  const int64_t less = bytes - table.piece_bytes[storage];
  const int producer = graph_.storages[storage].producer;
  const int backward = 2 * ops_ - 1 - graph_.last_backward_read[storage];
  const int begin = std::max(state.next_op, producer + 1);
  if (producer >= state.next_op) segments.push_back({producer, producer + 1, less});
  segments.push_back({begin, backward, bytes});
  segments.push_back({backward, backward + 1, less});
}

void UnitLifetimes::append_segments(int unit, ResidencyId residency, const MicrobatchState& state,
                                    const MemoryTable& table, bool eager_drain, bool prefetch,
                                    std::vector<CoverSegment>& segments) const {
  const UnitSpec& spec = graph_.units[unit];
  const Retire retire = residencies()[residency].retire;
  int rebuilt_at = 2 * ops_;
  for (int s : spec.storages) rebuilt_at = std::min(rebuilt_at, first_backward_point_[s]);
  for (int s : spec.storages) {
    if (retire == Retire::kDrop && spec.rebuild == Rebuild::kInPieces) {
      append_pieces(s, state, table, segments);
      continue;
    }
    const int last_use = graph_.last_forward_read[s];
    const bool now = state.storage[s] == StorageFate::kLive && last_use < state.next_op;
    int begin = now ? state.next_op : last_use + 1;
    int end = first_backward_point_[s];
    int64_t bytes = table.storage_bytes[s];
    if (retire == Retire::kDrop) end = rebuilt_at;
    if (retire == Retire::kEncode) bytes -= table.encoded_bytes[s];
    if (retire == Retire::kOffload) {
      if (!now && !eager_drain) begin = lazy_drain_point_[last_use];
      if (prefetch) end = prefetch_point_[s];
    }
    if (begin < end && bytes > 0) segments.push_back({begin, end, bytes});
  }
}

}  // namespace bagualu
