#include "bagualu/provision/rank_driver.h"

#include <algorithm>
#include <list>
#include <string>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/provision/floor.h"
#include "bagualu/provision/plan_cost.h"
#include "bagualu/provision/rank_flight.h"
#include "bagualu/provision/rank_memory.h"
#include "bagualu/provision/rank_segment.h"

namespace bagualu {
namespace {

using Phase = Flight::Phase;

std::vector<LayerLoad> every_layer(const Graph& graph, const LayerLoad& load) {
  return std::vector<LayerLoad>(static_cast<size_t>(graph.layers), load);
}

bool is_backward(PassKind kind) {
  return kind == PassKind::kBackward || kind == PassKind::kInputGrad;
}

bool receives(const Graph& graph, PassKind kind) {
  if (kind == PassKind::kForward) return graph.ops.front().kind == OpKind::kStageRecv;
  return is_backward(kind) && graph.ops.back().kind == OpKind::kStageSend;
}

std::vector<ScheduleItem> solve_order(const DualBatchInstance& instance) {
  // A micro-batch's segment takes milliseconds: what is within 0.2 % or 20 us is good enough.
  SolveOptions options;
  options.tolerance_ns = 20'000;
  options.max_labels = 20'000;
  return solve(instance, options).order;
}

}  // namespace

class RankDriver::Impl {
 public:
  Impl(std::vector<RankStage> stages, const RankOptions& options, RankHost& host)
      : stages_(std::move(stages)), options_(options), host_(host), memory_(stages_.size()) {
    for (const RankStage& stage : stages_) {
      const ProvisionContext& context = *stage.context;
      const Graph& graph = *context.graph;
      dependence_.emplace_back(graph);
      balanced_.push_back(memory_table(graph, every_layer(graph, context.balanced)));
      calm_rest_bytes_.push_back(
          rest_bytes(graph, uniform_plan(graph, kSave), every_layer(graph, context.balanced)));
      least_rest_bytes_.push_back(
          rest_bytes(graph, survival_plan(graph), every_layer(graph, context.worst_case)));
    }
  }

  RankRun run(const RankProgram& program) {
    program_ = &program;
    run_ = {};
    flights_.clear();
    actions_.clear();
    memory_.reset();
    for (pass_ = 0; pass_ < program.passes.size();) {
      const bool fused = pass_ < program.fused.size() && program.fused[pass_];
      memory_.begin_peak();
      prepare(pass_);
      if (fused) prepare(pass_ + 1);
      host_.begin_pass(program.passes[pass_]);
      drain_later_ = resting_with_drains();
      fused ? pair() : single();
      drain_what_rested();
      flush();
      host_.end_pass(program.passes[pass_]);
      note_peak(fused);
      pass_ += fused ? 2 : 1;
      if (options_.stop_at_death && !run_.deaths.empty()) break;
    }
    if (run_.deaths.empty() || !options_.stop_at_death) finish();
    run_.memory = memory_.total();
    run_.memory.peak_bytes = memory_.highest_bytes();
    run_.memory.host_peak_bytes = memory_.highest_host_bytes();
    return std::move(run_);
  }

  const Flight& flight_of(int slot) const {
    for (const Flight& one : flights_) {
      if (one.slot == slot) return one;
    }
    throw InternalError("no flight in slot " + std::to_string(slot));
  }
  const RankStage& stage(const Flight& one) const {
    return stages_[static_cast<size_t>(one.stage)];
  }

 private:
  // ---- flights ----

  const Graph& graph(const Flight& one) const { return *stage(one).context->graph; }

  int stage_index(const PipelinePass& pass) const {
    for (size_t i = 0; i < stages_.size(); ++i) {
      if (stages_[i].stage == pass.stage) return static_cast<int>(i);
    }
    throw InternalError("pass of a stage that is not here: " + pass_text(pass));
  }

  Flight* find(const PipelinePass& pass) {
    const int stage = stage_index(pass);
    for (Flight& one : flights_) {
      if (one.stage == stage && one.microbatch == pass.microbatch) return &one;
    }
    return nullptr;
  }

  Flight& at(const PipelinePass& pass) {
    Flight* found = find(pass);
    BGL_CHECK(found != nullptr, "not in flight", pass_text(pass));
    return *found;
  }

  Flight& open(const PipelinePass& pass) {
    BGL_CHECK(find(pass) == nullptr, "in flight already", pass_text(pass));
    Flight one;
    one.slot = free_slot();
    one.stage = stage_index(pass);
    one.microbatch = pass.microbatch;
    one.record = static_cast<int>(run_.flights.size());
    const ProvisionContext& context = *stages_[static_cast<size_t>(one.stage)].context;
    one.state = initial_state(*context.graph);
    one.plan = uniform_plan(*context.graph, kSave);
    one.loads = every_layer(*context.graph, context.balanced);
    one.table = balanced_[static_cast<size_t>(one.stage)];
    RankFlight record;
    record.stage = pass.stage;
    record.microbatch = pass.microbatch;
    run_.flights.push_back(std::move(record));
    flights_.push_back(std::move(one));
    host_.open(flights_.back().slot, pass.stage, pass.microbatch);
    return flights_.back();
  }

  int free_slot() const {
    for (int slot = 0;; ++slot) {
      const auto taken = [slot](const Flight& other) { return other.slot == slot; };
      if (std::none_of(flights_.begin(), flights_.end(), taken)) return slot;
    }
  }

  void close_if_over(Flight& one) {
    const MicrobatchState& state = one.state;
    if (!state.backward_done() || state.issued >= 0 || !state.weight_grads.empty()) return;
    flush();
    run_.flights[static_cast<size_t>(one.record)].plan = one.plan;
    const int slot = one.slot;
    const auto mine = [slot](const Flight& other) { return other.slot == slot; };
    host_.close(slot);
    flights_.erase(std::find_if(flights_.begin(), flights_.end(), mine));
  }

  // ---- what is emitted ----

  // Replays what was appended to timeline_ for this flight, and keeps it for the host.
  void emit(const Flight& one) {
    for (const Action& action : timeline_) {
      const int64_t high = memory_.step(one.stage, graph(one), one.plan, one.table, action);
      actions_.push_back({one.slot, action});
      if (run_.decisions.empty()) continue;
      int64_t& peak = run_.decisions.back().peak_bytes;
      peak = std::max(peak, high);
    }
    timeline_.clear();
  }

  void flush() {
    if (actions_.empty()) return;
    host_.run(actions_);
    actions_.clear();
  }

  bool fits(const MemoryReplay& memory) const {
    return (options_.activation_budget_bytes == 0 ||
            memory.peak_bytes <= options_.activation_budget_bytes) &&
           (options_.host_budget_bytes == 0 ||
            memory.host_peak_bytes <= options_.host_budget_bytes);
  }

  void note_peak(bool fused) {
    const MemoryReplay& memory = memory_.total();
    for (int i = 0; i < (fused ? 2 : 1); ++i) {
      const PipelinePass& pass = program_->passes[pass_ + static_cast<size_t>(i)];
      for (RankFlight& record : run_.flights) {
        if (record.stage != pass.stage || record.microbatch != pass.microbatch) continue;
        record.peak_bytes = std::max(record.peak_bytes, memory.peak_bytes);
      }
    }
    if (!fits(memory)) run_.deaths.push_back(program_->passes[pass_]);
    memory_.end_peak();
  }

  // ---- neighbours ----

  // Receives to be posted and sends to be awaited before a pass.
  void prepare(size_t pass) {
    if (pass >= program_->sends.size()) return;
    for (const PipelinePass& sent : program_->sends[pass].await) await_send(sent);
    for (const PipelinePass& posted : program_->sends[pass].post) post(posted);
  }

  void await_send(const PipelinePass& pass) {
    Flight& one = at(pass);
    append_end(graph(one), one.plan, one.state, timeline_);
    emit(one);
    close_if_over(one);
  }

  void post(const PipelinePass& pass) {
    if (pass.kind == PassKind::kForward) {
      Flight& one = open(pass);
      append_forward_op(graph(one), one.plan, one.state, timeline_);
      emit(one);
      return;
    }
    Flight& one = at(pass);
    BGL_CHECK(one.phase == Phase::kResting && !one.state.in_backward, pass_text(pass));
    append_backward_op(graph(one), one.plan, false, one.state, timeline_);
    emit(one);
  }

  // Without a plan of sends an output is awaited as soon as it is sent.
  void sent(Flight& one) {
    if (!program_->sends.empty()) return;
    append_end(graph(one), one.plan, one.state, timeline_);
    emit(one);
  }

  void finish() {
    memory_.begin_peak();
    prepare(program_->passes.size());
    flush();
    memory_.end_peak();
    BGL_CHECK(flights_.empty() || !run_.deaths.empty(), "a micro-batch is still in flight");
  }

  // ---- passes ----

  void single() {
    const PipelinePass& pass = program_->passes[pass_];
    if (pass.kind == PassKind::kForward) {
      Flight& one = begin_forward(pass);
      run_forward_from(one, -1);
      end_forward(one);
    } else if (is_backward(pass.kind)) {
      Flight& one = begin_backward(pass);
      const bool defer = pass.kind == PassKind::kInputGrad && deferral_fits(one);
      if (pass.kind == PassKind::kInputGrad) {
        ++(defer ? run_.deferred_passes : run_.undeferred_passes);
      }
      run_backward(one, defer);
      end_backward(one);
    } else {
      Flight* one = find(pass);
      if (one == nullptr) return;  // its weight gradients were not put off
      run_weight_grads(*one);
      close_if_over(*one);
    }
  }

  // A forward beside a backward, gate by gate, as long as all ranks agree.
  void pair() {
    const PipelinePass& first = program_->passes[pass_];
    const PipelinePass& second = program_->passes[pass_ + 1];
    const bool forward_first = first.kind == PassKind::kForward;
    const PipelinePass& forward_pass = forward_first ? first : second;
    const PipelinePass& backward_pass = forward_first ? second : first;
    BGL_CHECK(forward_pass.kind == PassKind::kForward && is_backward(backward_pass.kind),
              pass_text(first), pass_text(second));
    Flight& one = begin_forward(forward_pass);
    Flight* partner = &at(backward_pass);
    const WeightGrads weight_grads =
        backward_pass.kind == PassKind::kInputGrad ? WeightGrads::kLeave : WeightGrads::kFill;
    for (int gate = -1; partner != nullptr;) {
      RankDecision decision = decide(one, gate, partner);
      const bool together =
          advance_both(one, decision, backward_pass, *partner, weight_grads, gate);
      ++(together ? run_.overlapped_segments : run_.serialised_segments);
      if (!together) {
        begin_backward(backward_pass);
        run_backward(*partner, /*defer=*/false);
      }
      if (partner->state.backward_done() || (together && gate < 0)) {
        run_backward(*partner, weight_grads == WeightGrads::kLeave);
        finish_partner(*std::exchange(partner, nullptr), weight_grads);
      }
      if (!together) {
        if (decision.decision.mitigated || !decision.decision.feasible) {
          decision = decide(one, gate, nullptr);
        }
        apply(one, std::move(decision));
        gate = run_forward(one);
      }
      if (partner == nullptr && gate >= 0) run_forward_from(one, gate);
    }
    end_forward(one);
  }

  // The rest of a forward, a decision first.
  void run_forward_from(Flight& one, int gate) {
    do {
      apply(one, decide(one, gate, nullptr));
      gate = run_forward(one);
    } while (gate >= 0);
  }

  Flight& begin_forward(const PipelinePass& pass) {
    Flight* one = find(pass);
    if (one == nullptr) one = &open(pass);
    BGL_CHECK(one->phase == Phase::kPosted, pass_text(pass));
    one->phase = Phase::kForward;
    return *one;
  }

  // Up to the next gate or the end. Returns: the gate, or -1.
  int run_forward(Flight& one) {
    int reached = -2;
    while (reached == -2) reached = append_forward_op(graph(one), one.plan, one.state, timeline_);
    emit(one);
    flush();
    if (reached >= 0) learn(one, reached);
    return reached;
  }

  void learn(Flight& one, int gate) {
    const int layer = graph(one).gates[static_cast<size_t>(gate)].layer;
    const GateCounts counts = host_.counts(one.slot, layer);
    one.loads[static_cast<size_t>(layer)] = counts.load;
    load_imbalance_ = counts.load_imbalance;
    update_layer(graph(one), dependence_[static_cast<size_t>(one.stage)], layer, counts.load,
                 one.table);
  }

  void end_forward(Flight& one) {
    one.phase = Phase::kResting;
    if (one.state.issued >= 0) sent(one);
    settle(one);
    run_.flights[static_cast<size_t>(one.record)].rest_bytes = one.bytes.rest_bytes;
  }

  void settle(Flight& one) const {
    const MicrobatchState state = without_boundary(graph(one), one);
    Plan survival = survival_plan(graph(one));
    keep_past_choices(graph(one), state, survival);
    one.bytes = resting_microbatch_bytes(graph(one), state, one.plan, one.table);
    one.least = resting_microbatch_bytes(graph(one), state, survival, one.table);
  }

  Flight& begin_backward(const PipelinePass& pass) {
    Flight& one = at(pass);
    if (one.phase == Phase::kBackward) return one;
    BGL_CHECK(one.phase == Phase::kResting, pass_text(pass));
    one.phase = Phase::kBackward;
    const auto& fates = one.state.storage;
    run_.flights[static_cast<size_t>(one.record)].demotions =
        static_cast<int>(std::count_if(fates.begin(), fates.end(), [](StorageFate fate) {
          return fate != StorageFate::kLive && fate != StorageFate::kGone &&
                 fate != StorageFate::kAbsent;
        }));
    return one;
  }

  void run_backward(Flight& one, bool defer) {
    while (!one.state.backward_done()) {
      append_backward_op(graph(one), one.plan, defer, one.state, timeline_);
      emit(one);
    }
  }

  void end_backward(Flight& one) {
    one.phase = Phase::kEnding;
    if (one.state.issued >= 0) sent(one);
    close_if_over(one);
  }

  void finish_partner(Flight& beside, WeightGrads weight_grads) {
    if (weight_grads == WeightGrads::kFill) run_weight_grads(beside);
    end_backward(beside);
  }

  void run_weight_grads(Flight& one) {
    while (!one.state.weight_grads.empty()) {
      append_weight_grad(graph(one), one.state, timeline_);
      emit(one);
    }
  }

  // ---- memory ----

  // Whether the weight gradients of this backward may be put off. Whatever waits already is
  // computed first if the backward would not even fit whole.
  bool deferral_fits(Flight& one) {
    if (backward_fits(one, true)) return true;
    if (!backward_fits(one, false)) run_all_weight_grads();
    return false;
  }

  bool backward_fits(const Flight& one, bool defer) const {
    MicrobatchState state = one.state;
    MemoryReplay memory = memory_.total();
    return backward_fits(one, state, defer, memory);
  }

  bool backward_fits(const Flight& one, MicrobatchState& state, bool defer,
                     MemoryReplay& memory) const {
    memory.peak_bytes = memory.live_bytes;
    memory.host_peak_bytes = memory.host_live_bytes;
    Timeline rest;
    while (!state.backward_done()) append_backward_op(graph(one), one.plan, defer, state, rest);
    replay_memory(graph(one), one.plan, one.table, rest, 0, memory);
    return fits(memory);
  }

  void run_all_weight_grads() {
    for (auto one = flights_.begin(); one != flights_.end();) {
      Flight& flight = *one++;  // it may be closed
      run_weight_grads(flight);
      close_if_over(flight);
    }
  }

  bool weight_grads_wait() const {
    return std::any_of(flights_.begin(), flights_.end(),
                       [](const Flight& one) { return !one.state.weight_grads.empty(); });
  }

  std::vector<int> resting_with_drains() const {
    std::vector<int> slots;
    for (const Flight& one : flights_) {
      if (one.phase == Phase::kResting && !one.state.pending.empty()) slots.push_back(one.slot);
    }
    return slots;
  }

  // Offloads of a forward have had a whole pass to run in.
  void drain_what_rested() {
    for (int slot : drain_later_) {
      for (Flight& one : flights_) {
        if (one.slot != slot || one.phase != Phase::kResting || one.state.in_backward) continue;
        append_drains(graph(one), one.plan, one.state, timeline_);
        emit(one);
        settle(one);
      }
    }
  }

  // ---- decisions ----

  RankDecision decide(Flight& one, int gate, const Flight* partner) {
    RankDecision made = ask(one, gate, partner);
    // Weight gradients that wait hold bytes that no plan can give up, but they can be computed now.
    const bool short_of_bytes = made.decision.mitigated || !made.decision.feasible;
    if (partner == nullptr && short_of_bytes && weight_grads_wait()) {
      run_all_weight_grads();
      return ask(one, gate, nullptr);
    }
    return made;
  }

  RankDecision ask(const Flight& one, int gate, const Flight* partner) {
    const RankStage& of = stage(one);
    GateInput input;
    input.gate = gate;
    const MicrobatchState start = gate < 0 ? initial_state(graph(one)) : MicrobatchState{};
    input.state = gate < 0 ? &start : &one.state;
    input.plan = &one.plan;
    input.loads = &one.loads;
    input.load_imbalance = gate < 0 ? 1.0 : load_imbalance_;
    describe_others(one, partner, input);
    look_ahead(one, partner, input);
    host_.deciding();
    RankDecision made;
    made.decision = of.policy->decide(input);
    made.slot = one.slot;
    made.stage = of.stage;
    made.microbatch = one.microbatch;
    made.gate = gate;
    made.load_imbalance = input.load_imbalance;
    host_.decided(made);
    return made;
  }

  // The other flights of the same stage. A partner whose backward has begun can no longer be
  // demoted; it is gone before this micro-batch's own backward.
  void describe_others(const Flight& one, const Flight* partner, GateInput& input) const {
    input.memory = memory_.of(one.stage);
    for (const Flight& other : flights_) {
      if (other.stage != one.stage) continue;
      if (other.slot == one.slot) {
        // A receive that was posted for this forward is forecast with the rest of it.
        if (input.gate < 0) input.memory.live_bytes -= posted_bytes(one);
        continue;
      }
      input.memory.live_bytes -= boundary_bytes(graph(other), other);
      if (other.phase != Phase::kResting) continue;
      input.resting.push_back({&other.state, &other.plan, &other.loads, other.bytes, other.least});
      input.resting_bytes += other.bytes.rest_bytes;
      input.least_resting_bytes += other.least.rest_bytes;
    }
    if (partner != nullptr && partner->phase == Phase::kBackward && partner->stage == one.stage) {
      const int64_t held = partner_bytes(*partner);
      input.resting_bytes += held;
      input.least_resting_bytes += held;
    }
    input.memory.peak_bytes = input.memory.live_bytes;
    input.memory.host_peak_bytes = input.memory.host_live_bytes;
  }

  int64_t posted_bytes(const Flight& one) const {
    int64_t bytes = 0;
    if (one.state.next_op == 1 && one.state.issued == 0) {
      for (int s : graph(one).ops[0].creates) bytes += one.table.storage_bytes[s];
    }
    return bytes;
  }

  int64_t partner_bytes(const Flight& partner) const {
    int64_t bytes = 0;
    for (size_t s = 0; s < partner.state.storage.size(); ++s) {
      const StorageFate fate = partner.state.storage[s];
      if (fate == StorageFate::kLive || fate == StorageFate::kReloading ||
          fate == StorageFate::kDraining) {
        bytes += partner.table.storage_bytes[s];
      }
    }
    return bytes;
  }

  // The stage's passes up to the backward of this micro-batch, and who is in flight then.
  void look_ahead(const Flight& one, const Flight* partner, GateInput& input) const {
    const int stage = stages_[static_cast<size_t>(one.stage)].stage;
    if (partner != nullptr && partner->stage == one.stage && partner->phase == Phase::kResting) {
      input.ahead.push_back(PassKind::kBackward);
    }
    const bool fused = pass_ < program_->fused.size() && program_->fused[pass_];
    int64_t later = 0;
    for (size_t p = pass_ + (fused ? 2 : 1); p < program_->passes.size(); ++p) {
      const PipelinePass& pass = program_->passes[p];
      if (pass.stage != stage || pass.kind == PassKind::kWeightGrad) continue;
      if (pass.kind != PassKind::kForward && !is_backward(pass.kind)) continue;
      input.ahead.push_back(is_backward(pass.kind) ? PassKind::kBackward : PassKind::kForward);
      if (is_backward(pass.kind) && pass.microbatch == one.microbatch) break;
      later += pass.kind == PassKind::kForward ? 1 : 0;
    }
    const auto at = static_cast<size_t>(one.stage);
    input.backward_resting_bytes = later * calm_rest_bytes_[at];
    input.least_backward_resting_bytes = later * least_rest_bytes_[at];
  }

  void record(RankDecision made) {
    made.peak_bytes = memory_.total().live_bytes;
    run_.decisions.push_back(std::move(made));
  }

  void apply(Flight& one, RankDecision made) {
    record(made);
    const Decision& decision = made.decision;
    const ProvisionContext& context = *stage(one).context;
    RankFlight& outcome = run_.flights[static_cast<size_t>(one.record)];
    outcome.exposed_ns = decision.resting_plans.empty()
                             ? decision.exposed_ns
                             : plan_cost_ns(context, one.loads, one.state, decision.plan);
    outcome.repeat_step = outcome.repeat_step || decision.repeat_step;
    size_t next = 0;
    for (Flight& other : flights_) {
      if (next >= decision.resting_plans.size()) break;
      if (other.stage != one.stage || other.slot == one.slot || other.phase != Phase::kResting) {
        continue;
      }
      demote(other, decision.resting_plans[next++]);
    }
    one.plan = decision.plan;
    keep_past_choices(graph(one), one.state, one.plan);
    append_demotions(graph(one), one.plan, one.state, timeline_);
    emit(one);
  }

  void demote(Flight& resting, Plan plan) {
    keep_past_choices(graph(resting), resting.state, plan);
    if (plan == resting.plan) return;
    const ProvisionContext& context = *stage(resting).context;
    int64_t& exposed_ns = run_.flights[static_cast<size_t>(resting.record)].exposed_ns;
    for (int u = 0; u < static_cast<int>(graph(resting).units.size()); ++u) {
      if (plan.residency[u] == resting.plan.residency[u]) continue;
      exposed_ns += unit_cost_ns(context, resting.loads, u, plan.residency[u],
                                 /*drains_now=*/true, plan.prefetch);
    }
    resting.plan = std::move(plan);
    append_demotions(graph(resting), resting.plan, resting.state, timeline_);
    emit(resting);
    settle(resting);
  }

  // ---- pairs ----

  // Runs the forward to its next gate beside a part of the backward, if that fits on every rank.
  // Returns: false if it did not; nothing has happened then. Sets `gate` to the one reached.
  bool advance_both(Flight& one, RankDecision& made, const PipelinePass& backward_pass,
                    Flight& beside, WeightGrads weight_grads, int& gate) {
    Plan plan = made.decision.plan;
    keep_past_choices(graph(one), one.state, plan);
    OverlappedSegment segment = overlapped_segment(
        {&graph(one), stage(one).context->cost, &one}, plan,
        {&graph(beside), stage(beside).context->cost, &beside}, weight_grads, solve_order);
    const bool limited = options_.activation_budget_bytes > 0 || options_.host_budget_bytes > 0;
    if (limited) {
      const bool calm = !made.decision.mitigated && made.decision.feasible;
      if (!host_.agree(calm && segment_fits(one, plan, beside, segment))) return false;
    }
    begin_backward(backward_pass);
    record(std::move(made));
    RankFlight& outcome = run_.flights[static_cast<size_t>(one.record)];
    outcome.exposed_ns = run_.decisions.back().decision.exposed_ns;
    outcome.repeat_step = outcome.repeat_step || run_.decisions.back().decision.repeat_step;
    one.plan = std::move(plan);
    for (const StageAction& action : segment.actions) {
      timeline_ = {action.action};
      emit(action.slot == one.slot ? one : beside);
    }
    one.state = std::move(segment.forward);
    beside.state = std::move(segment.backward);
    flush();
    gate = segment.gate;
    if (gate >= 0) learn(one, gate);
    return true;
  }

  bool segment_fits(const Flight& one, const Plan& plan, const Flight& beside,
                    const OverlappedSegment& segment) const {
    MemoryReplay memory = memory_.total();
    memory.peak_bytes = memory.live_bytes;
    memory.host_peak_bytes = memory.host_live_bytes;
    for (const StageAction& action : segment.actions) {
      const Flight& of = action.slot == one.slot ? one : beside;
      replay_action(graph(of), action.slot == one.slot ? plan : of.plan, of.table, action.action,
                    memory);
    }
    if (!fits(memory)) return false;
    MicrobatchState rest = segment.backward;
    return backward_fits(beside, rest, /*defer=*/false, memory);
  }

  const std::vector<RankStage> stages_;
  const RankOptions options_;
  RankHost& host_;
  std::vector<LoadDependence> dependence_;
  std::vector<MemoryTable> balanced_;
  std::vector<int64_t> calm_rest_bytes_, least_rest_bytes_;

  const RankProgram* program_ = nullptr;
  size_t pass_ = 0;
  std::list<Flight> flights_;  ///< in the order of their forwards
  std::vector<int> drain_later_;
  Timeline timeline_;     ///< appended, not replayed yet
  RankTimeline actions_;  ///< replayed, not run yet
  RankMemory memory_;
  double load_imbalance_ = 1.0;
  RankRun run_;
};

RankDriver::RankDriver(std::vector<RankStage> stages, const RankOptions& options, RankHost& host)
    : impl_(std::make_unique<Impl>(std::move(stages), options, host)) {}

RankDriver::~RankDriver() = default;

RankRun RankDriver::run(const RankProgram& program) { return impl_->run(program); }

const Plan& RankDriver::plan_of(int slot) const { return impl_->flight_of(slot).plan; }

const RankStage& RankDriver::stage_of(int slot) const {
  return impl_->stage(impl_->flight_of(slot));
}

}  // namespace bagualu
