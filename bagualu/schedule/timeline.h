// Timeline of one micro-batch: the actions that a rank executes, in order. Start here to see how a
// plan becomes work: the runtime's executor runs these actions and never reorders, and
// replay_memory() (replay.h) walks the same actions to give live bytes and the peak.
//
// Glossary
//   segment   the actions from one decision to the next: up to gate 0, gate to gate, the last gate
//             to the end of forward, backward.
//   drain     the logical point at which an offloaded storage's device bytes are returned: the copy
//             is awaited there, so peaks do not depend on the speed of a copy.
//   end       the logical point at which a communication is awaited. It was issued earlier; between
//             the two another micro-batch may compute.
// Invariants
//   Bytes change only at actions. Every saved storage is released exactly once.
//   Actions are appended operator by operator, so that two micro-batches, each with a state of its
//   own, can be interleaved in one RankTimeline without knowing of each other.
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
  kForward,      ///< id = op: creates op.creates; a communication is only issued
  kBackward,     ///< id = op: creates op.bwd_creates, weight gradient included; as kForward
  kRecompute,    ///< id = op: creates those outputs that are dropped
  kFree,         ///< id = storage: last use is over
  kDrop,         ///< id = storage: given up, will be recomputed
  kOffload,      ///< id = storage: copy to host issued
  kDrain,        ///< id = storage: copy awaited, device bytes returned
  kReload,       ///< id = storage: device bytes taken, copy to device issued
  kAwait,        ///< id = storage: copy to device awaited
  kEncode,       ///< id = lossy storage: encoded copy made, original returned
  kDecode,       ///< id = storage: original made again, encoded copy returned
  kGate,         ///< id = layer: the routed counts of this layer are known, the plan may change
  kForwardEnd,   ///< id = communication op: its forward is awaited
  kBackwardEnd,  ///< id = communication op: its backward is awaited
  kInputGrad,    ///< id = op: backward without its weight gradient, which follows later
  kWeightGrad,   ///< id = op
};

struct Action {
  ActionKind kind{};
  int id = -1;
  bool operator==(const Action&) const = default;
};

using Timeline = std::vector<Action>;

/// An action of one of several micro-batches in flight.
struct StageAction {
  int slot = 0;  ///< which of them; a number the rank's driver gives and reuses
  Action action;
  bool operator==(const StageAction&) const = default;
};

/// What a rank of a pipeline executes, in order.
using RankTimeline = std::vector<StageAction>;

/// True if an action's id is an op; else it is a storage, or a layer for kGate.
bool names_op(ActionKind kind);

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
  int next_op = 0;  ///< forward
  int segment = 0;
  int next_backward = -1;  ///< backward op whose turn it is; -1: before backward, or through
  bool in_backward = false;
  bool backward_begun = false;  ///< beyond a receive that was posted early
  int issued = -1;  ///< communication op whose result the next op waits for; -1: none
  int sent = -1;    ///< send to another stage, of either direction, that is not awaited
  /// Ops whose weight gradient is still to come, oldest first.
  std::vector<int> weight_grads;

  bool forward_done(const Graph& graph) const {
    return next_op == static_cast<int>(graph.ops.size());
  }
  /// Nothing is left but weight gradients and the end of a communication.
  bool backward_done() const { return in_backward && next_backward < 0; }
};

MicrobatchState initial_state(const Graph& graph);

/// Appends the forward up to and including the next gate, or to the end of forward.
/// Returns: the gate's index in graph.gates, or -1 at the end.
int append_forward(const Graph& graph, const Plan& plan, MicrobatchState& state,
                   Timeline& timeline);

/// Appends one forward op, before it the end of the communication it follows.
/// Returns: as append_forward() if the op was a router; else -2, or -1 if the forward is through.
int append_forward_op(const Graph& graph, const Plan& plan, MicrobatchState& state,
                      Timeline& timeline);

/// Appends one backward op, before it the end of the communication it follows and all that brings
/// back what it reads; at the first also the drains of forward's offloads.
/// If `split` and the op allows it, as input gradient; its weight gradient joins
/// state.weight_grads. It does not where a storage that the weight gradient reads is rebuilt in
/// pieces only.
/// Requires: the forward is through, the backward is not.
void append_backward_op(const Graph& graph, const Plan& plan, bool split, MicrobatchState& state,
                        Timeline& timeline);

/// Appends the oldest weight gradient that is still to come.
void append_weight_grad(const Graph& graph, MicrobatchState& state, Timeline& timeline);

/// Appends the end of the send to another stage that is under way, if there is one. Nothing in its
/// own micro-batch waits for it.
void append_end(const Graph& graph, const Plan& plan, MicrobatchState& state, Timeline& timeline);

/// Between forward and backward: appends the drains of offloads that are still under way.
void append_drains(const Graph& graph, const Plan& plan, MicrobatchState& state,
                   Timeline& timeline);

/// Between forward and backward: issues the reloads of what the first layer of the backward reads.
/// Requires: nothing is left to drain.
void append_prefetch(const Graph& graph, const Plan& plan, MicrobatchState& state,
                     Timeline& timeline);

/// Appends, ahead of its turn, what makes a dropped storage again. Nothing if it is not dropped, or
/// only ever rebuilt in pieces.
void append_rebuild(const Graph& graph, const Plan& plan, int storage, MicrobatchState& state,
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

/// Appends the whole backward, unsplit, and the end of its last communication. Requires: forward is
/// at its end.
void append_backward(const Graph& graph, const Plan& plan, MicrobatchState& state,
                     Timeline& timeline);

/// The whole micro-batch under one plan.
Timeline build_timeline(const Graph& graph, const Plan& plan);

/// True if the expert intermediate `storage` is materialised under `plan` (its unit is not
/// dropped).
bool is_materialised(const Graph& graph, const Plan& plan, int storage);

}  // namespace bagualu
