#include "bagualu/provision/in_flight.h"

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

void add_backward(const Graph& graph, const Plan& plan, const MemoryTable& table,
                  MicrobatchState& state, MemoryReplay& replay, MicrobatchBytes& bytes) {
  bytes.rest_bytes = replay.live_bytes;
  bytes.host_rest_bytes = replay.host_live_bytes;
  replay.peak_bytes = replay.live_bytes;
  Timeline timeline;
  append_backward(graph, plan, state, timeline);
  replay_memory(graph, plan, table, timeline, 0, replay);
  bytes.backward_peak_bytes = replay.peak_bytes;
  bytes.host_peak_bytes = replay.host_peak_bytes;
}

}  // namespace

MemoryReplay held_bytes(const Graph& graph, const MicrobatchState& state,
                        const MemoryTable& table) {
  MemoryReplay held;
  for (size_t s = 0; s < graph.storages.size(); ++s) {
    switch (state.storage[s]) {
      case StorageFate::kLive:
      case StorageFate::kReloading:
        held.live_bytes += table.storage_bytes[s];
        break;
      case StorageFate::kDraining:
        held.live_bytes += table.storage_bytes[s];
        held.host_live_bytes += table.storage_bytes[s];
        break;
      case StorageFate::kHost:
        held.host_live_bytes += table.storage_bytes[s];
        break;
      case StorageFate::kEncoded:
        held.live_bytes += table.encoded_bytes[s];
        break;
      default:
        break;
    }
  }
  return held;
}

MicrobatchBytes microbatch_bytes(const Graph& graph, const Plan& plan, const MemoryTable& table) {
  MicrobatchState state = initial_state(graph);
  Timeline timeline;
  while (append_forward(graph, plan, state, timeline) >= 0) {
  }
  MemoryReplay replay;
  replay_memory(graph, plan, table, timeline, 0, replay);
  MicrobatchBytes bytes;
  bytes.forward_peak_bytes = replay.peak_bytes;
  add_backward(graph, plan, table, state, replay, bytes);
  return bytes;
}

MicrobatchBytes resting_microbatch_bytes(const Graph& graph, const MicrobatchState& state,
                                         const Plan& plan, const MemoryTable& table) {
  BGL_CHECK(state.next_op == static_cast<int>(graph.ops.size()), state.next_op);
  MicrobatchState after = state;
  Timeline timeline;
  append_demotions(graph, plan, after, timeline);
  MemoryReplay replay = held_bytes(graph, state, table);
  replay.host_peak_bytes = replay.host_live_bytes;
  replay_memory(graph, plan, table, timeline, 0, replay);
  MicrobatchBytes bytes;
  bytes.forward_peak_bytes = replay.live_bytes;
  add_backward(graph, plan, table, after, replay, bytes);
  return bytes;
}

int64_t rest_bytes(const Graph& graph, const Plan& plan, const std::vector<LayerLoad>& loads) {
  return microbatch_bytes(graph, plan, memory_table(graph, loads)).rest_bytes;
}

}  // namespace bagualu
