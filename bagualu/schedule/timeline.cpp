#include "bagualu/schedule/timeline.h"

#include <algorithm>
#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

Retire retire_of(const Graph& graph, const Plan& plan, int storage) {
  const int unit = graph.storages[storage].unit;
  return residencies()[plan.residency[unit]].retire;
}

class Appender {
 public:
  Appender(const Graph& graph, const Plan& plan, MicrobatchState& state, Timeline& timeline)
      : graph_(graph), plan_(plan), state_(state), timeline_(timeline) {}

  // Returns: the gate's index, -1 at the end of forward, -2 otherwise.
  int forward_op() {
    const int i = state_.next_op;
    const int ops = static_cast<int>(graph_.ops.size());
    if (i >= ops) return -1;
    end();
    const OpSpec& op = graph_.ops[i];
    if (op.kind == OpKind::kAttnNorm || op.kind == OpKind::kFinalNorm) drain_point();
    add(ActionKind::kForward, i);
    for (int s : op.creates) state_.storage[s] = created_state(s);
    ++state_.next_op;
    if (op.stream == Stream::kComm) {
      (op.kind == OpKind::kStageSend ? state_.sent : state_.issued) = i;
      return state_.next_op == ops ? -1 : -2;
    }
    retire_after_forward(i);
    if (op.kind == OpKind::kRouter) {
      drain_point();
      add(ActionKind::kGate, op.layer);
      return gate_of(i);
    }
    return state_.next_op == ops ? -1 : -2;
  }

  // The end of the communication whose result comes next, and of what only it still needed.
  void end() { end(std::exchange(state_.issued, -1), state_.in_backward); }

  void end_send() {
    const int i = std::exchange(state_.sent, -1);
    end(i, i >= 0 && graph_.ops[i].kind == OpKind::kStageRecv);
  }

  void demote() {
    if (plan_.eager_drain) drain_all();
    for (size_t s = 0; s < state_.storage.size(); ++s) {
      const int id = static_cast<int>(s);
      const StorageSpec& spec = graph_.storages[s];
      if (spec.unit < 0 || state_.storage[s] != StorageFate::kLive) continue;
      if (graph_.last_forward_read[s] >= state_.next_op) continue;
      retire(id, /*drain_now=*/true);
    }
  }

  void backward_op(bool split) {
    BGL_CHECK(state_.next_op == static_cast<int>(graph_.ops.size()), state_.next_op);
    end();
    if (!state_.in_backward) {
      state_.in_backward = true;
      state_.next_backward = backward_op_below(static_cast<int>(graph_.ops.size()));
    }
    const int i = state_.next_backward;
    BGL_CHECK(i >= 0, "backward is through");
    const OpSpec& op = graph_.ops[i];
    // A receive may be posted long before the rest: it takes its own bytes and moves no others.
    if (op.kind != OpKind::kStageSend) begin_backward(i);
    for (int s : op.bwd_saved) ensure_live(s);
    free_intermediates();
    const bool deferred = split && defers(op);
    add(deferred ? ActionKind::kInputGrad : ActionKind::kBackward, i);
    for (int s : op.bwd_creates) {
      if (deferred || !graph_.storages[s].deferred_only) state_.storage[s] = StorageFate::kLive;
    }
    if (deferred) state_.weight_grads.push_back(i);
    state_.next_backward = backward_op_below(i);
    if (op.kind == OpKind::kStageRecv) {
      BGL_CHECK(state_.sent < 0, "the send of the forward is not awaited");
      state_.sent = i;
    } else if (op.stream == Stream::kComm) {
      state_.issued = i;
    } else {
      retire_after_backward(i);
    }
    enter_layer(i, state_.next_backward);
  }

  void weight_grad() {
    BGL_CHECK(!state_.weight_grads.empty(), "no weight gradient is left");
    const int i = state_.weight_grads.front();
    state_.weight_grads.erase(state_.weight_grads.begin());
    add(ActionKind::kWeightGrad, i);
    const OpSpec& op = graph_.ops[i];
    for (const auto* list : {&op.wgrad_saved, &op.wgrad_reads}) {
      for (int s : *list) free_if_unread(s);
    }
  }

  void drains() {
    BGL_CHECK(!state_.in_backward, "drains come before backward");
    drain_all();
  }

  void prefetch() {
    BGL_CHECK(!state_.backward_begun && state_.pending.empty(), "prefetch comes before backward");
    reload_layer(backward_op_below(static_cast<int>(graph_.ops.size())));
  }

  void rebuild(int s) {
    if (state_.storage[s] != StorageFate::kDropped || is_streamed(s)) return;
    if (!state_.backward_begun) drain_all();  // what it reads may be on its way to the host
    ensure_live(s);
    free_intermediates();
  }

 private:
  void end(int i, bool backward) {
    if (i < 0) return;
    add(backward ? ActionKind::kBackwardEnd : ActionKind::kForwardEnd, i);
    backward ? retire_after_backward(i) : retire_after_forward(i);
  }

  void add(ActionKind kind, int id) { timeline_.push_back({kind, id}); }

  StorageFate created_state(int s) const {
    return is_streamed(s) && retire_of(graph_, plan_, s) == Retire::kDrop ? StorageFate::kDropped
                                                                          : StorageFate::kLive;
  }

  bool is_streamed(int s) const {
    const int unit = graph_.storages[s].unit;
    return unit >= 0 && graph_.units[unit].rebuild == Rebuild::kInPieces;
  }

  int gate_of(int op) const {
    for (size_t g = 0; g < graph_.gates.size(); ++g) {
      if (graph_.gates[g].op == op) return static_cast<int>(g);
    }
    throw InternalError("router without a gate: " + graph_.ops[op].name);
  }

  int backward_op_below(int i) const {
    do {
      --i;
    } while (i >= 0 && !graph_.ops[i].has_backward);
    return i;
  }

  void begin_backward(int first) {
    if (state_.backward_begun) return;
    state_.backward_begun = true;
    drain_all();
    if (plan_.prefetch) prefetch_before(first);
  }

  // A layer's first op issues the reloads of the layer below.
  void enter_layer(int from, int to) {
    if (!state_.backward_begun || !plan_.prefetch || to < 0) return;
    if (graph_.ops[from].layer != graph_.ops[to].layer) prefetch_before(to);
  }

  bool defers(const OpSpec& op) const {
    return op.has_wgrad &&
           std::none_of(op.wgrad_saved.begin(), op.wgrad_saved.end(), [this](int s) {
             return is_streamed(s) && state_.storage[s] != StorageFate::kLive;
           });
  }

  void retire_after_backward(int i) {
    const OpSpec& op = graph_.ops[i];
    for (const auto* list :
         {&op.bwd_saved, &op.bwd_reads, &op.bwd_creates, &op.wgrad_saved, &op.wgrad_reads}) {
      for (int s : *list) {
        if (graph_.last_backward_read[s] == i) free_if_unread(s);
      }
    }
  }

  // Frees a storage that no backward op to come reads, unless a weight gradient still does.
  void free_if_unread(int s) {
    StorageFate& fate = state_.storage[s];
    if (fate == StorageFate::kGone || fate == StorageFate::kAbsent) return;
    const int last = graph_.last_backward_read[s];
    const bool in_use = last == state_.issued || (last == state_.sent && state_.in_backward);
    if (last <= state_.next_backward || in_use) return;
    for (int i : state_.weight_grads) {
      const OpSpec& op = graph_.ops[i];
      if (std::find(op.wgrad_saved.begin(), op.wgrad_saved.end(), s) != op.wgrad_saved.end() ||
          std::find(op.wgrad_reads.begin(), op.wgrad_reads.end(), s) != op.wgrad_reads.end()) {
        return;
      }
    }
    if (fate != StorageFate::kDropped) add(ActionKind::kFree, s);
    fate = StorageFate::kGone;
  }

  void retire_after_forward(int i) {
    const OpSpec& op = graph_.ops[i];
    for (const auto* list : {&op.reads, &op.creates}) {
      for (int s : *list) {
        if (graph_.last_forward_read[s] != i || state_.storage[s] != StorageFate::kLive) continue;
        if (graph_.storages[s].unit < 0) {
          add(ActionKind::kFree, s);
          state_.storage[s] = StorageFate::kGone;
        } else {
          retire(s, plan_.eager_drain);
        }
      }
    }
  }

  void retire(int s, bool drain_now) {
    switch (retire_of(graph_, plan_, s)) {
      case Retire::kKeep:
        return;
      case Retire::kDrop:
        add(ActionKind::kDrop, s);
        state_.storage[s] = StorageFate::kDropped;
        return;
      case Retire::kOffload:
        add(ActionKind::kOffload, s);
        if (drain_now) {
          drain(s);
        } else {
          state_.storage[s] = StorageFate::kDraining;
          state_.pending.push_back({s, state_.segment});
        }
        return;
      case Retire::kEncode:
        if (graph_.storages[s].lossy_element_bytes == 0) return;
        add(ActionKind::kEncode, s);
        state_.storage[s] = StorageFate::kEncoded;
        return;
    }
  }

  void drain(int s) {
    add(ActionKind::kDrain, s);
    state_.storage[s] = StorageFate::kHost;
  }

  // An offload issued in one segment (attention part, or expert part of a layer) has the whole next
  // segment to run in; its bytes come back at the following drain point.
  void drain_point() {
    ++state_.segment;
    auto keep = state_.pending.begin();
    for (const auto& pending : state_.pending) {
      if (pending.segment + 1 < state_.segment) {
        drain(pending.storage);
      } else {
        *keep++ = pending;
      }
    }
    state_.pending.erase(keep, state_.pending.end());
  }

  void drain_all() {
    for (const auto& pending : state_.pending) drain(pending.storage);
    state_.pending.clear();
  }

  // Reloads what the layer below `op` will need, while this layer's backward computes.
  void prefetch_before(int op) {
    const int layer = graph_.ops[op].layer;
    int below = op;
    while (below >= 0 && graph_.ops[below].layer == layer) --below;
    reload_layer(below);
  }

  void reload_layer(int last_op) {
    if (last_op < 0) return;
    const int layer = graph_.ops[last_op].layer;
    for (int i = last_op; i >= 0 && graph_.ops[i].layer == layer; --i) {
      for (int s : graph_.ops[i].bwd_saved) {
        if (state_.storage[s] == StorageFate::kHost) reload(s);
      }
    }
  }

  void reload(int s) {
    add(ActionKind::kReload, s);
    state_.storage[s] = StorageFate::kReloading;
  }

  void ensure_live(int s) {
    if (state_.storage[s] == StorageFate::kHost) reload(s);
    switch (state_.storage[s]) {
      case StorageFate::kLive:
        return;
      case StorageFate::kReloading:
        add(ActionKind::kAwait, s);
        break;
      case StorageFate::kEncoded:
        add(ActionKind::kDecode, s);
        break;
      case StorageFate::kDropped:
        if (is_streamed(s)) return;  // the experts' backward rebuilds it piece by piece
        recompute(graph_.storages[s].producer);
        return;
      default:
        throw InternalError("backward needs a storage that is gone: " + graph_.storages[s].name);
    }
    state_.storage[s] = StorageFate::kLive;
  }

  // An input that was not kept for backward is rebuilt first. Everything else that was dropped and
  // whose closure reads a rebuilt intermediate is rebuilt in the same go, so that no operator of a
  // closure runs twice.
  void recompute(int op) {
    for (int s : graph_.ops[op].reads) {
      if (state_.storage[s] == StorageFate::kGone && graph_.storages[s].unit < 0) {
        recompute(graph_.storages[s].producer);
      } else if (!is_rebuilt_intermediate(s)) {
        ensure_live(s);
      }
    }
    if (!is_needed(op)) return;  // it ran as a sibling of what made its inputs
    run_again(op);
    if (!intermediates_.empty()) recompute_siblings(op);
  }

  void run_again(int op) {
    add(ActionKind::kRecompute, op);
    for (int s : graph_.ops[op].creates) {
      const bool intermediate = graph_.storages[s].unit < 0;
      if (state_.storage[s] == StorageFate::kDropped) {
        state_.storage[s] = StorageFate::kLive;
      } else if (intermediate && state_.storage[s] == StorageFate::kGone) {
        state_.storage[s] = StorageFate::kLive;
        intermediates_.push_back(s);
      }
    }
  }

  // Whether anything that `op` creates is dropped, or gone and read by what is being rebuilt.
  bool is_needed(int op) const {
    return std::any_of(graph_.ops[op].creates.begin(), graph_.ops[op].creates.end(), [this](int s) {
      const StorageFate fate = state_.storage[s];
      return fate == StorageFate::kDropped ||
             (graph_.storages[s].unit < 0 && fate == StorageFate::kGone);
    });
  }

  bool is_rebuilt_intermediate(int s) const {
    return graph_.storages[s].unit < 0 && state_.storage[s] == StorageFate::kLive;
  }

  void recompute_siblings(int op) {
    for (int i = 0; i < static_cast<int>(graph_.ops.size()); ++i) {
      const OpSpec& other = graph_.ops[i];
      if (i == op || other.layer != graph_.ops[op].layer) continue;
      const bool dropped = std::any_of(other.creates.begin(), other.creates.end(), [this](int s) {
        return state_.storage[s] == StorageFate::kDropped && !is_streamed(s);
      });
      if (dropped && needs_rebuilt_intermediate(i)) recompute(i);
    }
  }

  bool needs_rebuilt_intermediate(int op) const {
    const std::vector<int>& reads = graph_.ops[op].reads;
    return std::any_of(reads.begin(), reads.end(), [this](int s) {
      if (graph_.storages[s].unit >= 0) return false;
      return is_rebuilt_intermediate(s) || needs_rebuilt_intermediate(graph_.storages[s].producer);
    });
  }

  void free_intermediates() {
    for (int s : intermediates_) {
      add(ActionKind::kFree, s);
      state_.storage[s] = StorageFate::kGone;
    }
    intermediates_.clear();
  }

  const Graph& graph_;
  const Plan& plan_;
  MicrobatchState& state_;
  Timeline& timeline_;
  std::vector<int> intermediates_;  // rebuilt for a closure, freed when it is done
};

}  // namespace

Plan uniform_plan(const Graph& graph, ResidencyId residency) {
  Plan plan;
  const bool rebuilds = residencies()[residency].needs_rebuild;
  for (const UnitSpec& unit : graph.units) {
    const bool allowed = !unit.pinned && (!rebuilds || unit.rebuild != Rebuild::kNever);
    plan.residency.push_back(allowed ? residency : kSave);
  }
  return plan;
}

MicrobatchState initial_state(const Graph& graph) {
  MicrobatchState state;
  state.storage.assign(graph.storages.size(), StorageFate::kAbsent);
  return state;
}

int append_forward(const Graph& graph, const Plan& plan, MicrobatchState& state,
                   Timeline& timeline) {
  Appender appender(graph, plan, state, timeline);
  for (;;) {
    const int reached = appender.forward_op();
    if (reached == -2) continue;
    if (reached == -1) appender.end_send();
    return reached;
  }
}

int append_forward_op(const Graph& graph, const Plan& plan, MicrobatchState& state,
                      Timeline& timeline) {
  return Appender(graph, plan, state, timeline).forward_op();
}

void append_backward_op(const Graph& graph, const Plan& plan, bool split, MicrobatchState& state,
                        Timeline& timeline) {
  Appender(graph, plan, state, timeline).backward_op(split);
}

void append_weight_grad(const Graph& graph, MicrobatchState& state, Timeline& timeline) {
  static const Plan kNoPlan;
  Appender(graph, kNoPlan, state, timeline).weight_grad();
}

void append_end(const Graph& graph, const Plan& plan, MicrobatchState& state, Timeline& timeline) {
  Appender(graph, plan, state, timeline).end_send();
}

void append_drains(const Graph& graph, const Plan& plan, MicrobatchState& state,
                   Timeline& timeline) {
  Appender(graph, plan, state, timeline).drains();
}

void append_prefetch(const Graph& graph, const Plan& plan, MicrobatchState& state,
                     Timeline& timeline) {
  Appender(graph, plan, state, timeline).prefetch();
}

void append_rebuild(const Graph& graph, const Plan& plan, int storage, MicrobatchState& state,
                    Timeline& timeline) {
  Appender(graph, plan, state, timeline).rebuild(storage);
}

void append_demotions(const Graph& graph, const Plan& plan, MicrobatchState& state,
                      Timeline& timeline) {
  Appender(graph, plan, state, timeline).demote();
}

void append_backward(const Graph& graph, const Plan& plan, MicrobatchState& state,
                     Timeline& timeline) {
  Appender appender(graph, plan, state, timeline);
  appender.end_send();
  do {
    appender.backward_op(/*split=*/false);
  } while (!state.backward_done());
  appender.end_send();
}

void keep_past_choices(const Graph& graph, const MicrobatchState& state, Plan& plan) {
  for (size_t s = 0; s < graph.storages.size(); ++s) {
    const int unit = graph.storages[s].unit;
    if (unit < 0) continue;
    Retire done = Retire::kKeep;
    if (state.storage[s] == StorageFate::kDropped) done = Retire::kDrop;
    if (state.storage[s] == StorageFate::kHost || state.storage[s] == StorageFate::kDraining) {
      done = Retire::kOffload;
    }
    if (state.storage[s] == StorageFate::kEncoded) done = Retire::kEncode;
    if (done == Retire::kKeep || residencies()[plan.residency[unit]].retire == done) continue;
    for (size_t r = 0; r < residencies().size(); ++r) {
      if (residencies()[r].retire == done) plan.residency[unit] = static_cast<ResidencyId>(r);
    }
  }
}

Timeline build_timeline(const Graph& graph, const Plan& plan) {
  MicrobatchState state = initial_state(graph);
  Timeline timeline;
  while (append_forward(graph, plan, state, timeline) >= 0) {
  }
  append_backward(graph, plan, state, timeline);
  return timeline;
}

bool is_materialised(const Graph& graph, const Plan& plan, int storage) {
  const int unit = graph.storages[storage].unit;
  return unit < 0 || graph.units[unit].rebuild != Rebuild::kInPieces ||
         retire_of(graph, plan, storage) != Retire::kDrop;
}

}  // namespace bagualu
