#include "bagualu/provision/rank_flight.h"

namespace bagualu {

MicrobatchState without_boundary(const Graph& graph, const Flight& flight) {
  MicrobatchState state = flight.state;
  switch (flight.phase) {
    case Flight::Phase::kPosted:
      return initial_state(graph);
    case Flight::Phase::kForward:
    case Flight::Phase::kBackward:
      return state;
    case Flight::Phase::kResting:
      if (!state.in_backward) break;
      // The gradient's receive was posted.
      for (int s : graph.ops[state.issued].bwd_creates) state.storage[s] = StorageFate::kAbsent;
      state.in_backward = false;
      state.next_backward = -1;
      state.issued = -1;
      break;
    case Flight::Phase::kEnding:
      break;
  }
  Timeline ignored;
  append_end(graph, flight.plan, state, ignored);
  return state;
}

int64_t boundary_bytes(const Graph& graph, const Flight& flight) {
  return held_bytes(graph, flight.state, flight.table).live_bytes -
         held_bytes(graph, without_boundary(graph, flight), flight.table).live_bytes;
}

}  // namespace bagualu
