#include "bagualu/provision/rank_driver.h"

#include <algorithm>
#include <string>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/provision/floor.h"
#include "bagualu/provision/rank_driver_impl.h"

namespace bagualu {
namespace {

// A segment takes milliseconds: what is within 0.2 % or 20 us is good enough. No deadline: equal
// inputs give equal timelines, and the work of a search is limited as it is.
SolveOptions segment_options() {
  SolveOptions options;
  options.tolerance_ns = 20'000;
  options.max_labels = 20'000;
  return options;
}

}  // namespace

RankDriver::Impl::Impl(std::vector<RankStage> stages, const RankOptions& options, RankHost& host)
    : stages_(std::move(stages)), options_(options), host_(host), memory_(stages_.size()) {
  for (const RankStage& stage : stages_) {
    const ProvisionContext& context = *stage.context;
    const Graph& graph = *context.graph;
    dependence_.emplace_back(graph);
    balanced_.push_back(memory_table(graph, every_layer(graph, context.balanced)));
    calm_rest_bytes_.push_back(
        rest_bytes(graph, uniform_plan(graph, kSave), every_layer(graph, context.balanced)));
    const MicrobatchBytes least = microbatch_bytes(
        graph, survival_plan(graph), memory_table(graph, every_layer(graph, context.worst_case)));
    least_rest_bytes_.push_back(least.rest_bytes);
    least_forward_bytes_.push_back(least.forward_peak_bytes);
  }
}

RankRun RankDriver::Impl::run(const RankProgram& program) {
  program_ = &program;
  run_ = {};
  flights_.clear();
  actions_.clear();
  memory_.reset();
  for (pass_ = 0; pass_ < program.passes.size();) {
    const bool fused = program.is_fused(pass_);
    const PipelinePass& pass = program.passes[pass_];
    const PipelinePass* beside = fused ? &program.passes[pass_ + 1] : nullptr;
    memory_.begin_peak();
    host_.begin_pass(pass, beside);
    prepare(pass_);
    drain_later_ = resting_with_drains();
    fused ? pair() : single();
    drain_what_rested();
    flush();
    host_.end_pass(pass, beside);
    note_peak();
    pass_ = program.after(pass_);
    if (options_.stop_at_death && !run_.deaths.empty()) break;
  }
  if (run_.deaths.empty() || !options_.stop_at_death) finish();
  run_.memory = memory_.total();
  run_.memory.peak_bytes = memory_.highest_bytes();
  run_.memory.host_peak_bytes = memory_.highest_host_bytes();
  return std::move(run_);
}

const Flight& RankDriver::Impl::flight_of(int slot) const {
  for (const Flight& one : flights_) {
    if (one.slot == slot) return one;
  }
  throw InternalError("no flight in slot " + std::to_string(slot));
}

const RankStage& RankDriver::Impl::stage(const Flight& one) const {
  return stages_[static_cast<size_t>(one.stage)];
}

void RankDriver::Impl::single() {
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
    prefetch_next([&](MemoryReplay& memory) {
      const Timeline rest = rest_of_backward(one, one.state, defer);
      replay_memory(graph(one), one.plan, one.table, rest, 0, memory);
    });
    run_backward(one, defer);
    end_backward(one);
  } else {
    Flight* one = find(pass);
    if (one == nullptr) return;  // its weight gradients were not put off
    run_weight_grads(*one);
    close_if_over(*one);
  }
}

void RankDriver::Impl::pair() {
  const PipelinePass& first = program_->passes[pass_];
  const PipelinePass& second = program_->passes[pass_ + 1];
  const bool forward_first = first.kind == PassKind::kForward;
  const PipelinePass& forward_pass = forward_first ? first : second;
  const PipelinePass& backward_pass = forward_first ? second : first;
  BGL_CHECK(forward_pass.kind == PassKind::kForward && is_backward(backward_pass.kind),
            pass_text(first), pass_text(second));
  Flight& one = begin_forward(forward_pass);
  Flight* partner = &at(backward_pass);
  receive(*partner, backward_pass);
  const WeightGrads weight_grads =
      backward_pass.kind == PassKind::kInputGrad ? WeightGrads::kLeave : WeightGrads::kFill;
  for (int gate = -1; partner != nullptr;) {
    RankDecision decision = decide(one, gate, partner);
    if (advance_both(one, decision, backward_pass, *partner, weight_grads, gate)) {
      ++run_.overlapped_segments;
      if (!partner->state.backward_done() && gate >= 0) continue;
      run_backward(*partner, weight_grads == WeightGrads::kLeave);
      finish_partner(*std::exchange(partner, nullptr), weight_grads);
    } else {
      ++run_.serialised_segments;
      gate = backward_first(one, std::move(decision), backward_pass,
                            *std::exchange(partner, nullptr), weight_grads);
    }
    if (gate >= 0) run_forward_from(one, gate);
  }
  end_forward(one);
}

// Some rank has no room for both: the backward runs to its end, then the forward to its next gate,
// which is returned.
int RankDriver::Impl::backward_first(Flight& one, RankDecision decision,
                                     const PipelinePass& backward_pass, Flight& partner,
                                     WeightGrads weight_grads) {
  // What was decided for a partner at rest counts before it begins.
  const int gate = decision.gate;
  const bool at_rest = partner.phase == Phase::kResting;
  const bool settled = !decision.decision.mitigated && decision.decision.feasible;
  if (at_rest) apply(one, decision);
  begin_backward(backward_pass);
  run_backward(partner, /*defer=*/false);
  finish_partner(partner, weight_grads);
  if (!at_rest) apply(one, settled ? std::move(decision) : decide(one, gate, nullptr));
  return run_forward(one);
}

void RankDriver::Impl::run_forward_from(Flight& one, int gate) {
  do {
    apply(one, decide(one, gate, nullptr));
    gate = run_forward(one);
  } while (gate >= 0);
}

Flight& RankDriver::Impl::begin_forward(const PipelinePass& pass) {
  Flight* one = find(pass);
  if (one == nullptr) one = &open(pass);
  BGL_CHECK(one->phase == Phase::kPosted, pass_text(pass));
  receive(*one, pass);
  one->phase = Phase::kForward;
  return *one;
}

int RankDriver::Impl::run_forward(Flight& one) {
  if (next_gate(graph(one), one.state) < 0) {
    prefetch_next([&](MemoryReplay& memory) {
      MicrobatchState state = one.state;
      Timeline rest;
      while (append_forward_op(graph(one), one.plan, state, rest) == -2) {
      }
      replay_memory(graph(one), one.plan, one.table, rest, 0, memory);
    });
  }
  int reached = -2;
  while (reached == -2) reached = append_forward_op(graph(one), one.plan, one.state, timeline_);
  emit(one);
  flush();
  if (reached >= 0) learn(one, reached);
  return reached;
}

void RankDriver::Impl::learn(Flight& one, int gate) {
  const int layer = graph(one).gates[static_cast<size_t>(gate)].layer;
  const GateCounts counts = host_.counts(one.slot, layer);
  one.loads[static_cast<size_t>(layer)] = counts.load;
  load_imbalance_ = counts.load_imbalance;
  update_layer(graph(one), dependence_[static_cast<size_t>(one.stage)], layer, counts.load,
               one.table);
}

void RankDriver::Impl::end_forward(Flight& one) {
  one.phase = Phase::kResting;
  if (one.state.sent >= 0) sent(one, PassKind::kForward);
  settle(one);
  run_.flights[static_cast<size_t>(one.record)].rest_bytes = one.bytes.rest_bytes;
}

void RankDriver::Impl::settle(Flight& one) const {
  const MicrobatchState state = without_boundary(graph(one), one);
  Plan survival = survival_plan(graph(one));
  keep_past_choices(graph(one), state, survival);
  one.bytes = resting_microbatch_bytes(graph(one), state, one.plan, one.table);
  one.least = resting_microbatch_bytes(graph(one), state, survival, one.table);
}

Flight& RankDriver::Impl::begin_backward(const PipelinePass& pass) {
  Flight& one = at(pass);
  if (one.phase == Phase::kBackward) return one;
  BGL_CHECK(one.phase == Phase::kResting, pass_text(pass));
  receive(one, pass);
  one.phase = Phase::kBackward;
  const auto& fates = one.state.storage;
  run_.flights[static_cast<size_t>(one.record)].demotions =
      static_cast<int>(std::count_if(fates.begin(), fates.end(), [](StorageFate fate) {
        return fate != StorageFate::kLive && fate != StorageFate::kGone &&
               fate != StorageFate::kAbsent;
      }));
  return one;
}

void RankDriver::Impl::run_backward(Flight& one, bool defer) {
  add_older_first(one, defer);
  while (!one.state.backward_done()) {
    append_backward_op(graph(one), one.plan, defer, one.state, timeline_);
    emit(one);
  }
}

void RankDriver::Impl::end_backward(Flight& one) {
  one.phase = Phase::kEnding;
  if (one.state.sent >= 0) sent(one, PassKind::kBackward);
  close_if_over(one);
}

void RankDriver::Impl::finish_partner(Flight& beside, WeightGrads weight_grads) {
  if (weight_grads == WeightGrads::kFill) run_weight_grads(beside);
  end_backward(beside);
}

void RankDriver::Impl::run_weight_grads(Flight& one) {
  while (!one.state.weight_grads.empty()) {
    append_weight_grad(graph(one), one.state, timeline_);
    emit(one);
  }
}

void RankDriver::Impl::add_older_first(const Flight& one, bool defer) {
  if (!weight_grads_wait()) return;
  const Timeline rest = rest_of_backward(one, one.state, defer);
  const auto adds_itself = [&](int op) {
    return std::find(rest.begin(), rest.end(), Action{ActionKind::kBackward, op}) != rest.end();
  };
  for (auto next = flights_.begin(); next != flights_.end();) {
    Flight& older = *next++;  // it may be closed
    if (older.stage != one.stage || older.microbatch >= one.microbatch) continue;
    auto& waiting = older.state.weight_grads;
    while (std::any_of(waiting.begin(), waiting.end(), adds_itself)) {
      append_weight_grad(graph(older), older.state, timeline_);
      emit(older);
    }
    close_if_over(older);
  }
}

bool RankDriver::Impl::advance_both(Flight& one, RankDecision& made,
                                    const PipelinePass& backward_pass, Flight& beside,
                                    WeightGrads weight_grads, int& gate) {
  Plan plan = made.decision.plan;
  keep_past_choices(graph(one), one.state, plan);
  OverlappedSegment segment =
      overlapped_segment({&graph(one), stage(one).context->cost, &one}, plan,
                         {&graph(beside), stage(beside).context->cost, &beside}, weight_grads,
                         [this](const DualBatchInstance& instance) {
                           return schedules_.solve(instance, segment_options()).order;
                         });
  const bool limited = options_.activation_budget_bytes > 0 || options_.host_budget_bytes > 0;
  if (limited) {
    const bool calm = !made.decision.mitigated && made.decision.feasible;
    if (!host_.agree(calm && segment_fits(one, plan, beside, segment))) return false;
  }
  begin_backward(backward_pass);
  add_older_first(beside, weight_grads == WeightGrads::kLeave);
  record(one, std::move(made));
  one.plan = std::move(plan);
  if (segment.gate < 0) {
    prefetch_next(
        [&](MemoryReplay& memory) { replay_segment(one, one.plan, beside, segment, memory); });
  }
  for (const StageAction& action : segment.actions) {
    hand_out(action.slot == one.slot ? one : beside, action.action);
  }
  one.state = std::move(segment.forward);
  beside.state = std::move(segment.backward);
  flush();
  gate = segment.gate;
  if (gate >= 0) learn(one, gate);
  return true;
}

void RankDriver::Impl::replay_segment(const Flight& one, const Plan& plan, const Flight& beside,
                                      const OverlappedSegment& segment,
                                      MemoryReplay& memory) const {
  for (const StageAction& action : segment.actions) {
    const bool own = action.slot == one.slot;
    const Flight& of = own ? one : beside;
    replay_action(graph(of), own ? plan : of.plan, of.table, action.action, memory);
  }
}

bool RankDriver::Impl::segment_fits(const Flight& one, const Plan& plan, const Flight& beside,
                                    const OverlappedSegment& segment) const {
  MemoryReplay memory = memory_.now();
  replay_segment(one, plan, beside, segment, memory);
  return fits(memory) && backward_fits(beside, segment.backward, /*defer=*/false, memory);
}

RankDriver::RankDriver(std::vector<RankStage> stages, const RankOptions& options, RankHost& host)
    : impl_(std::make_unique<Impl>(std::move(stages), options, host)) {}

RankDriver::~RankDriver() = default;

RankRun RankDriver::run(const RankProgram& program) { return impl_->run(program); }

const Plan& RankDriver::plan_of(int slot) const { return impl_->flight_of(slot).plan; }

const MemoryReplay& RankDriver::memory() const { return impl_->memory(); }

}  // namespace bagualu
