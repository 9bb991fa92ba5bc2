#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/provision/in_flight.h"
#include "bagualu/provision/policy.h"
#include "bagualu/schedule/timeline.h"

namespace bagualu {

/// A micro-batch in one virtual stage, as the driver of a rank keeps it.
struct Flight {
  enum class Phase : uint8_t {
    kPosted,    ///< only its input's receive was posted
    kForward,   ///< its forward runs
    kResting,   ///< between forward and backward; its gradient's receive may be posted
    kBackward,  ///< its backward runs
    kEnding,    ///< weight gradients or the end of a send are left
  };

  int slot = -1;
  int stage = -1;  ///< index of the rank's stages
  int microbatch = -1;
  int record = -1;  ///< index in RankRun::flights
  Phase phase = Phase::kPosted;
  MicrobatchState state;
  Plan plan;
  std::vector<LayerLoad> loads;  ///< real where gates have run, balanced beyond
  MemoryTable table;
  MicrobatchBytes bytes;  ///< while it rests
  MicrobatchBytes least;
};

/// The flight's state as if no communication with another stage were under way: what a decision
/// reasons about. Boundaries have a reserve of their own.
MicrobatchState without_boundary(const Graph& graph, const Flight& flight);

/// Bytes that without_boundary() leaves out.
int64_t boundary_bytes(const Graph& graph, const Flight& flight);

}  // namespace bagualu
