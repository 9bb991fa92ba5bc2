#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/schedule/timeline.h"

namespace bagualu {

/// Bytes of a graph at given loads, computed once per set of loads.
struct MemoryTable {
  std::vector<int64_t> storage_bytes;         ///< by storage
  std::vector<int64_t> piece_bytes;           ///< by storage; 0 where it has none
  std::vector<int64_t> fwd_workspace;         ///< by op, everything materialised
  std::vector<int64_t> bwd_workspace;         ///< by op
  std::vector<int64_t> input_grad_workspace;  ///< by op, of a split backward
  std::vector<int64_t> wgrad_workspace;       ///< by op
  std::vector<int64_t> encoded_bytes;         ///< by storage, size of the encoded copy
};

MemoryTable memory_table(const Graph& graph, const std::vector<LayerLoad>& loads);
/// Which entries of a memory table depend on routed loads, by layer; built once per graph.
struct LoadDependence {
  explicit LoadDependence(const Graph& graph);

  std::vector<std::vector<int>> storages;  ///< by layer
  std::vector<std::vector<int>> ops;       ///< by layer
  std::vector<uint8_t> storage_depends;    ///< by storage
  std::vector<uint8_t> op_depends;         ///< by op
};

/// Recomputes the entries of one layer that depend on its load, after its gate.
void update_layer(const Graph& graph, const LoadDependence& dependence, int layer,
                  const LayerLoad& load, MemoryTable& table);

/// Live bytes above the static ones, and their largest value so far.
struct MemoryReplay {
  int64_t live_bytes = 0;
  int64_t peak_bytes = 0;
  int peak_action = -1;  ///< index in the last replayed timeline, -1 if the peak is older
  int64_t host_live_bytes = 0;
  int64_t host_peak_bytes = 0;
};

/// Walks a timeline from `begin`. The storage states tell which expert intermediates of a forward
/// or backward are in pieces, so `plan` must be the one the timeline was built with. Ensures:
/// peak_bytes is at least every live value met, workspaces included. Cost: O(actions), some
/// nanoseconds each.
void replay_memory(const Graph& graph, const Plan& plan, const MemoryTable& table,
                   const Timeline& timeline, size_t begin, MemoryReplay& replay);

/// The highest live value inside one action, and `replay` after it. Its peaks are raised.
/// For callers that interleave several micro-batches, each with its own graph, plan and table.
int64_t replay_action(const Graph& graph, const Plan& plan, const MemoryTable& table,
                      const Action& action, MemoryReplay& replay);

/// What a run of actions does to the bytes, relative to where it starts.
struct ReplaySpan {
  int64_t net_bytes = 0;
  int64_t high_bytes = 0;  ///< highest value met, may be below 0
  int64_t host_net_bytes = 0;
  int64_t host_high_bytes = 0;
};
ReplaySpan replay_span(const Graph& graph, const Plan& plan, const MemoryTable& table,
                       const Timeline& timeline, size_t begin, size_t end);

/// Live bytes after every action and the peak inside it, for pictures and reports.
struct MemoryPoint {
  int64_t live_bytes = 0;
  int64_t peak_bytes = 0;
};
std::vector<MemoryPoint> memory_profile(const Graph& graph, const Plan& plan,
                                        const MemoryTable& table, const Timeline& timeline);

/// As replay_memory() from the start of `timeline`, and writes the highest live value inside every
/// action to `high_bytes` (by action), so that a planner sees where bytes are missing.
void replay_profile(const Graph& graph, const Plan& plan, const MemoryTable& table,
                    const Timeline& timeline, MemoryReplay& replay,
                    std::vector<int64_t>& high_bytes);

}  // namespace bagualu
