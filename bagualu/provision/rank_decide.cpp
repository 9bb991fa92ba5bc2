#include <algorithm>
#include <string>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/provision/floor.h"
#include "bagualu/provision/plan_cost.h"
#include "bagualu/provision/rank_driver_impl.h"

namespace bagualu {

bool RankDriver::Impl::deferral_fits(Flight& one) {
  if (backward_fits(one, true)) return true;
  if (!backward_fits(one, false)) run_all_weight_grads();
  return false;
}

bool RankDriver::Impl::backward_fits(const Flight& one, bool defer) const {
  return backward_fits(one, one.state, defer, memory_.now());
}

bool RankDriver::Impl::backward_fits(const Flight& one, MicrobatchState state, bool defer,
                                     MemoryReplay memory) const {
  replay_memory(graph(one), one.plan, one.table, rest_of_backward(one, std::move(state), defer), 0,
                memory);
  return fits(memory);
}

Timeline RankDriver::Impl::rest_of_backward(const Flight& one, MicrobatchState state,
                                            bool defer) const {
  Timeline rest;
  while (!state.backward_done()) append_backward_op(graph(one), one.plan, defer, state, rest);
  return rest;
}

void RankDriver::Impl::run_all_weight_grads() {
  for (auto one = flights_.begin(); one != flights_.end();) {
    Flight& flight = *one++;  // it may be closed
    run_weight_grads(flight);
    close_if_over(flight);
  }
}

bool RankDriver::Impl::weight_grads_wait() const {
  return std::any_of(flights_.begin(), flights_.end(),
                     [](const Flight& one) { return !one.state.weight_grads.empty(); });
}

std::vector<int> RankDriver::Impl::resting_with_drains() const {
  std::vector<int> slots;
  for (const Flight& one : flights_) {
    if (one.phase == Phase::kResting && !one.state.pending.empty()) slots.push_back(one.slot);
  }
  return slots;
}

// The micro-batch whose backward comes next, if something of its first layer is on the host.
Flight* RankDriver::Impl::next_to_reload() {
  const size_t next = program_->after(pass_);
  for (size_t p = next; p < std::min(program_->passes.size(), program_->after(next)); ++p) {
    if (!is_backward(program_->passes[p].kind)) continue;
    Flight* one = find(program_->passes[p]);
    if (one == nullptr || one->phase != Phase::kResting || !one->plan.prefetch ||
        !one->state.pending.empty()) {
      continue;
    }
    return one;
  }
  return nullptr;
}

// Issues the first reloads of the next backward now, beside the rest of this pass, where nothing is
// decided any more before it: if that fits, then that backward alone, and beside it whatever a new
// forward may need.
void RankDriver::Impl::prefetch_next(const std::function<void(MemoryReplay&)>& rest_of_pass) {
  Flight* next = options_.reload_ahead ? next_to_reload() : nullptr;
  if (next == nullptr) return;
  MicrobatchState state = next->state;
  Timeline reloads;
  append_prefetch(graph(*next), next->plan, state, reloads);
  if (reloads.empty()) return;
  MemoryReplay memory = memory_.now();
  replay_memory(graph(*next), next->plan, next->table, reloads, 0, memory);
  rest_of_pass(memory);
  if (!fits(memory)) return;
  MemoryReplay beside = memory;
  beside.peak_bytes = beside.live_bytes + least_forward_bytes_[static_cast<size_t>(next->stage)];
  if (!fits(beside) || !backward_fits(*next, std::move(state), /*defer=*/false, memory)) return;
  append_prefetch(graph(*next), next->plan, next->state, timeline_);
  emit(*next);
  settle(*next);
}

void RankDriver::Impl::drain_what_rested() {
  for (int slot : drain_later_) {
    for (Flight& one : flights_) {
      if (one.slot != slot || one.phase != Phase::kResting || one.state.in_backward) continue;
      append_drains(graph(one), one.plan, one.state, timeline_);
      emit(one);
      settle(one);
    }
  }
}

RankDecision RankDriver::Impl::decide(Flight& one, int gate, const Flight* partner) {
  RankDecision made = ask(one, gate, partner);
  // Weight gradients that wait hold bytes that no plan can give up, but they can be computed now.
  const bool short_of_bytes = made.decision.mitigated || !made.decision.feasible;
  if (partner == nullptr && short_of_bytes && weight_grads_wait()) {
    run_all_weight_grads();
    return ask(one, gate, nullptr);
  }
  return made;
}

RankDecision RankDriver::Impl::ask(const Flight& one, int gate, const Flight* partner) {
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
  Plan plan = made.decision.plan;
  keep_past_choices(graph(one), one.state, plan);
  for (size_t u = 0; u < plan.residency.size(); ++u) {
    if (plan.residency[u] != one.plan.residency[u] && plan.residency[u] != kSave) {
      made.changed_units.push_back(static_cast<int>(u));
    }
  }
  return made;
}

void RankDriver::Impl::describe_others(const Flight& one, const Flight* partner,
                                       GateInput& input) const {
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
    const int64_t held = held_bytes(graph(*partner), partner->state, partner->table).live_bytes;
    input.resting_bytes += held;
    input.least_resting_bytes += held;
  }
  input.memory.peak_bytes = input.memory.live_bytes;
  input.memory.host_peak_bytes = input.memory.host_live_bytes;
}

int64_t RankDriver::Impl::posted_bytes(const Flight& one) const {
  int64_t bytes = 0;
  if (one.state.next_op == 1 && one.state.issued == 0) {
    for (int s : graph(one).ops[0].creates) bytes += one.table.storage_bytes[s];
  }
  return bytes;
}

void RankDriver::Impl::look_ahead(const Flight& one, const Flight* partner,
                                  GateInput& input) const {
  const int stage = stages_[static_cast<size_t>(one.stage)].stage;
  if (partner != nullptr && partner->stage == one.stage && partner->phase == Phase::kResting) {
    input.ahead.push_back(PassKind::kBackward);
  }
  int64_t later = 0;
  for (size_t p = program_->after(pass_); p < program_->passes.size(); ++p) {
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

void RankDriver::Impl::record(const Flight& one, RankDecision made) {
  const Decision& decision = made.decision;
  RankFlight& outcome = run_.flights[static_cast<size_t>(one.record)];
  outcome.exposed_ns = decision.resting_plans.empty()
                           ? decision.exposed_ns
                           : plan_cost_ns(*stage(one).context, one.loads, one.state, decision.plan);
  outcome.repeat_step = outcome.repeat_step || decision.repeat_step;
  made.peak_bytes = memory_.total().live_bytes;
  run_.decisions.push_back(std::move(made));
}

void RankDriver::Impl::apply(Flight& one, RankDecision made) {
  record(one, made);
  const Decision& decision = made.decision;
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

void RankDriver::Impl::demote(Flight& resting, Plan plan) {
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

}  // namespace bagualu
