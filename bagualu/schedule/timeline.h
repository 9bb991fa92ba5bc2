// Timeline of one micro-batch: the actions that a rank executes, in order. Start here to see how a
// plan becomes work: the runtime's executor runs these actions and never reorders, and
// replay_memory() (replay.h) walks the same actions to give live bytes and the peak.
//
// Glossary
//   segment   the actions from one decision to the next: up to gate 0, gate to gate, the last gate
//             to the end of forward, backward.
//   drain     the logical point at which an offloaded storage's device bytes are returned: the copy
//             is awaited there, so peaks do not depend on the speed of a copy.
// Invariants
//   Bytes change only at actions. Every saved storage is released exactly once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cost/residency.h"
#include "bagualu/graph/graph.h"

namespace bagualu {

/// A choice for every unit of a graph.
struct Plan {
  std::vector<ResidencyId> residency;  ///< by unit; pinned units are kSave
  /// Drain an offload at once instead of one segment later: lower peak, the copy is exposed.
  bool eager_drain = false;
  /// Issue the reloads of a layer one layer ahead of its backward: hides them, needs their bytes.
  bool prefetch = true;

  bool operator==(const Plan&) const = default;
};

/// A plan in which every unit has `residency` where that is allowed (pinned units and, for
/// kRecompute, units that cannot be rebuilt are kSave).
Plan uniform_plan(const Graph& graph, ResidencyId residency);

/// Text form: {"version":1,"eager_drain":..,"prefetch":..,"units":{"layer0.qkv":"recompute",...}};
/// units left out are saved.
Json plan_to_json(const Graph& graph, const Plan& plan);
/// Throws: InvalidInput for an unknown unit or residency, or one that the unit does not allow.
Plan plan_from_json(const Graph& graph, const Json& json, const std::string& where);

enum class ActionKind : uint8_t {
  kForward,    ///< id = op: creates op.creates
  kBackward,   ///< id = op: creates op.bwd_creates
  kRecompute,  ///< id = op: creates those outputs that are dropped
  kFree,       ///< id = storage: last use is over
  kDrop,       ///< id = storage: given up, will be recomputed
  kOffload,    ///< id = storage: copy to host issued
  kDrain,      ///< id = storage: copy awaited, device bytes returned
  kReload,     ///< id = storage: device bytes taken, copy to device issued
  kAwait,      ///< id = storage: copy to device awaited
  kEncode,     ///< id = lossy storage: encoded copy made, original returned
  kDecode,     ///< id = storage: original made again, encoded copy returned
  kGate,       ///< id = layer: the routed counts of this layer are known, the plan may change
};

struct Action {
  ActionKind kind{};
  int id = -1;
  bool operator==(const Action&) const = default;
};

using Timeline = std::vector<Action>;

/// "recompute layer2.core_attn", "drain layer2.rows".
std::string action_text(const Graph& graph, const Action& action);
/// One line per action, for golden files and dumps.
std::string timeline_to_text(const Graph& graph, const Timeline& timeline);

enum class StorageFate : uint8_t {
  kAbsent,  ///< not created yet
  kLive,
  kDropped,
  kDraining,  ///< copy to host under way, device bytes still taken
  kHost,
  kReloading,  ///< device bytes taken, copy under way
  kEncoded,
  kGone,  ///< freed for good
};

/// Where a micro-batch stands between two segments.
struct MicrobatchState {
  struct PendingDrain {
    int storage = -1;
    int segment = 0;  ///< drained at the first drain point of a later segment
  };
  std::vector<StorageFate> storage;
  std::vector<PendingDrain> pending;
  int next_op = 0;
  int segment = 0;
};

MicrobatchState initial_state(const Graph& graph);

/// Appends the forward up to and including the next gate, or to the end of forward.
/// Returns: the gate's index in graph.gates, or -1 at the end.
int append_forward(const Graph& graph, const Plan& plan, MicrobatchState& state,
                   Timeline& timeline);

/// Appends what brings already produced storages in line with a plan changed at a gate: live
/// storages whose forward uses are over and which the plan no longer saves are dropped, or
/// offloaded and drained at once; an eager plan also drains what is still pending. A storage that
/// was given up stays given up.
void append_demotions(const Graph& graph, const Plan& plan, MicrobatchState& state,
                      Timeline& timeline);

/// Sets the residency of every unit that was already given up to what was done with it, so that a
/// plan made at a gate never contradicts the past. (A unit whose storages are still live is free.)
void keep_past_choices(const Graph& graph, const MicrobatchState& state, Plan& plan);

/// Appends the whole backward. Requires: forward is at its end.
void append_backward(const Graph& graph, const Plan& plan, MicrobatchState& state,
                     Timeline& timeline);

/// The whole micro-batch under one plan.
Timeline build_timeline(const Graph& graph, const Plan& plan);

/// True if the expert intermediate `storage` is materialised under `plan` (its unit is not
/// dropped).
bool is_materialised(const Graph& graph, const Plan& plan, int storage);

}  // namespace bagualu
