#include "bagualu/provision/rank_flight.h"

namespace bagualu {

MicrobatchState without_boundary(const Graph& graph, const Flight& flight) {
  MicrobatchState state = flight.state;
  if (flight.phase == Flight::Phase::kPosted) return initial_state(graph);
  if (flight.phase != Flight::Phase::kResting) return state;
  if (state.in_backward) {  // the gradient's receive was posted
    for (int s : graph.ops[state.issued].bwd_creates) state.storage[s] = StorageFate::kAbsent;
    state.in_backward = false;
    state.next_backward = -1;
    state.issued = -1;
  }
  Timeline ignored;
  append_end(graph, flight.plan, state, ignored);
  return state;
}

int64_t boundary_bytes(const Graph& graph, const Flight& flight) {
  const MicrobatchState without = without_boundary(graph, flight);
  const bool ending = flight.phase == Flight::Phase::kEnding;
  const auto on_device = [](StorageFate fate) {
    return fate == StorageFate::kLive || fate == StorageFate::kDraining ||
           fate == StorageFate::kReloading;
  };
  int64_t bytes = 0;
  for (size_t s = 0; s < graph.storages.size(); ++s) {
    if (!on_device(flight.state.storage[s])) continue;
    // What the send of the last gradient holds; weight gradients' inputs are no boundary.
    const bool sent =
        ending && flight.state.issued >= 0 && graph.last_backward_read[s] == flight.state.issued;
    if (sent || (!ending && !on_device(without.storage[s]))) bytes += flight.table.storage_bytes[s];
  }
  return bytes;
}

}  // namespace bagualu
