#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/cost/op_cost.h"
#include "bagualu/provision/cover_search.h"
#include "bagualu/schedule/replay.h"
#include "bagualu/schedule/timeline.h"

namespace bagualu {

/// When a given-up storage's bytes are away, in points (predictor.h); computed once per graph.
/// Note [Optimistic lifetimes]: a rebuild may happen earlier than assumed here (for a recomputed
/// consumer) and its workspace is ignored, so these savings are never too small. A search over them
/// cannot miss the optimum, and what it finds is checked by a replay of the real actions.
class UnitLifetimes {
 public:
  explicit UnitLifetimes(const Graph& graph);

  /// Appends what `unit` given `residency` takes away, compared to saving it.
  /// Requires: no storage of the unit was given up before.
  void append_segments(int unit, ResidencyId residency, const MicrobatchState& state,
                       const MemoryTable& table, bool eager_drain, bool prefetch,
                       std::vector<CoverSegment>& segments) const;

  /// True if a storage of the unit was already given up, so that its choice is made.
  bool decided(int unit, const MicrobatchState& state) const;
  /// True if a storage of the unit exists and its forward uses are over: an offload now is exposed.
  bool retired(int unit, const MicrobatchState& state) const;

 private:
  void append_pieces(int storage, const MicrobatchState& state, const MemoryTable& table,
                     std::vector<CoverSegment>& segments) const;

  const Graph& graph_;
  int ops_ = 0;
  std::vector<int> lazy_drain_point_;      ///< by op: where an offload issued there is drained
  std::vector<int> first_backward_point_;  ///< by storage
  std::vector<int> prefetch_point_;        ///< by storage
};

}  // namespace bagualu
