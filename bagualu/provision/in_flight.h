#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/schedule/replay.h"
#include "bagualu/schedule/timeline.h"

namespace bagualu {

/// What one micro-batch holds by itself, without the others in flight on its rank.
struct MicrobatchBytes {
  int64_t forward_peak_bytes = 0;
  int64_t rest_bytes = 0;           ///< between its forward and its backward
  int64_t backward_peak_bytes = 0;  ///< its rest included
  int64_t host_peak_bytes = 0;
  int64_t host_rest_bytes = 0;
  bool operator==(const MicrobatchBytes&) const = default;
};

/// Device and host bytes that a micro-batch in this state holds; no peaks.
MemoryReplay held_bytes(const Graph& graph, const MicrobatchState& state, const MemoryTable& table);

/// Of a micro-batch that runs under one plan from its start to its end.
MicrobatchBytes microbatch_bytes(const Graph& graph, const Plan& plan, const MemoryTable& table);

/// Of a micro-batch between its forward and its backward, once `plan` has taken over: what the plan
/// no longer saves is given up first. forward_peak_bytes is rest_bytes.
/// Requires: state.next_op is past the last op; `plan` keeps the past choices of `state`.
MicrobatchBytes resting_microbatch_bytes(const Graph& graph, const MicrobatchState& state,
                                         const Plan& plan, const MemoryTable& table);

/// What a micro-batch with these loads (one per layer) holds between its forward and its backward.
int64_t rest_bytes(const Graph& graph, const Plan& plan, const std::vector<LayerLoad>& loads);

}  // namespace bagualu
