#include <algorithm>
#include <string>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/provision/floor.h"
#include "bagualu/provision/rank_driver_impl.h"

namespace bagualu {
namespace {

bool receives(const Graph& graph, PassKind kind) {
  if (kind == PassKind::kForward) return graph.ops.front().kind == OpKind::kStageRecv;
  return is_backward(kind) && graph.ops.back().kind == OpKind::kStageSend;
}

}  // namespace

int RankDriver::Impl::stage_index(const PipelinePass& pass) const {
  for (size_t i = 0; i < stages_.size(); ++i) {
    if (stages_[i].stage == pass.stage) return static_cast<int>(i);
  }
  throw InternalError("pass of a stage that is not here: " + pass_text(pass));
}

Flight* RankDriver::Impl::find(const PipelinePass& pass) {
  const int stage = stage_index(pass);
  for (Flight& one : flights_) {
    if (one.stage == stage && one.microbatch == pass.microbatch) return &one;
  }
  return nullptr;
}

Flight& RankDriver::Impl::at(const PipelinePass& pass) {
  Flight* found = find(pass);
  BGL_CHECK(found != nullptr, "not in flight", pass_text(pass));
  return *found;
}

Flight& RankDriver::Impl::open(const PipelinePass& pass) {
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

int RankDriver::Impl::free_slot() const {
  for (int slot = 0;; ++slot) {
    const auto taken = [slot](const Flight& other) { return other.slot == slot; };
    if (std::none_of(flights_.begin(), flights_.end(), taken)) return slot;
  }
}

void RankDriver::Impl::close_if_over(Flight& one) {
  const MicrobatchState& state = one.state;
  if (!state.backward_done() || state.sent >= 0 || !state.weight_grads.empty()) return;
  flush();
  run_.flights[static_cast<size_t>(one.record)].plan = one.plan;
  const int slot = one.slot;
  const auto mine = [slot](const Flight& other) { return other.slot == slot; };
  host_.close(slot);
  flights_.remove_if(mine);
}

void RankDriver::Impl::emit(const Flight& one) {
  for (const Action& action : timeline_) hand_out(one, action);
  timeline_.clear();
}

void RankDriver::Impl::hand_out(const Flight& one, const Action& action) {
  const int64_t high = memory_.step(one.stage, graph(one), one.plan, one.table, action);
  actions_.push_back({one.slot, action});
  if (run_.decisions.empty()) return;
  int64_t& peak = run_.decisions.back().peak_bytes;
  peak = std::max(peak, high);
}

void RankDriver::Impl::flush() {
  if (actions_.empty()) return;
  host_.run(actions_);
  actions_.clear();
}

bool RankDriver::Impl::fits(const MemoryReplay& memory) const {
  return (options_.activation_budget_bytes == 0 ||
          memory.peak_bytes <= options_.activation_budget_bytes) &&
         (options_.host_budget_bytes == 0 || memory.host_peak_bytes <= options_.host_budget_bytes);
}

void RankDriver::Impl::note_peak() {
  const MemoryReplay& memory = memory_.total();
  for (size_t p = pass_; p < program_->after(pass_); ++p) {
    const PipelinePass& pass = program_->passes[p];
    for (RankFlight& record : run_.flights) {
      if (record.stage != pass.stage || record.microbatch != pass.microbatch) continue;
      record.peak_bytes = std::max(record.peak_bytes, memory.peak_bytes);
    }
  }
  if (!fits(memory)) run_.deaths.push_back(program_->passes[pass_]);
  memory_.end_peak();
}

void RankDriver::Impl::prepare(size_t pass) {
  if (pass >= program_->sends.size()) return;
  // First what a neighbour may wait for.
  for (const PipelinePass& posted : program_->sends[pass].post) post(posted);
  for (const PipelinePass& sent : program_->sends[pass].await) await_send(sent);
}

void RankDriver::Impl::await_send(const PipelinePass& pass) {
  Flight& one = at(pass);
  append_end(graph(one), one.plan, one.state, timeline_);
  emit(one);
  close_if_over(one);
}

void RankDriver::Impl::post(const PipelinePass& pass) {
  Flight* found = find(pass);
  Flight& one = found == nullptr ? open(pass) : *found;
  if (pass.kind == PassKind::kForward) {
    BGL_CHECK(one.phase == Phase::kPosted && one.state.next_op == 0, pass_text(pass));
    append_forward_op(graph(one), one.plan, one.state, timeline_);
  } else {
    BGL_CHECK(one.phase == Phase::kResting && !one.state.in_backward, pass_text(pass));
    append_backward_op(graph(one), one.plan, false, one.state, timeline_);
  }
  emit(one);
  end_send_of_neighbour_here(pass);
}

void RankDriver::Impl::receive(Flight& one, const PipelinePass& pass) {
  const bool posted =
      pass.kind == PassKind::kForward ? one.state.next_op > 0 : one.state.in_backward;
  if (!posted && receives(graph(one), pass.kind)) post(pass);
}

void RankDriver::Impl::end_send_of_neighbour_here(const PipelinePass& pass) {
  const int from = pass.stage + (pass.kind == PassKind::kForward ? -1 : 1);
  for (Flight& one : flights_) {
    if (stage(one).stage != from || one.microbatch != pass.microbatch) continue;
    append_end(graph(one), one.plan, one.state, timeline_);
    emit(one);
    close_if_over(one);
    return;
  }
}

void RankDriver::Impl::sent(Flight& one, PassKind kind) {
  if (!program_->sends.empty()) return;
  const int to = stage(one).stage + (kind == PassKind::kForward ? 1 : -1);
  if (std::any_of(stages_.begin(), stages_.end(),
                  [to](const RankStage& other) { return other.stage == to; })) {
    return;
  }
  append_end(graph(one), one.plan, one.state, timeline_);
  emit(one);
}

void RankDriver::Impl::finish() {
  memory_.begin_peak();
  prepare(program_->passes.size());
  flush();
  memory_.end_peak();
  BGL_CHECK(flights_.empty() || !run_.deaths.empty(), "a micro-batch is still in flight");
}

}  // namespace bagualu
