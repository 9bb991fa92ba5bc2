#include "bagualu/runtime/executor.h"

#include <ATen/ATen.h>

#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/runtime/clock.h"
#include "bagualu/runtime/executor_context.h"
#include "bagualu/runtime/ops/rope.h"

namespace bagualu {
Executor::Executor(std::vector<ExecutorStage> stages, const ModelSpec& spec,
                   const ExecutorOptions& options, ModelState& model, ExecutorGroups groups,
                   ExecutorMemory memory)
    : stages_(std::move(stages)),
      shared_(new ExecutorShared{spec,
                                 options,
                                 model,
                                 groups.ep,
                                 groups.pp,
                                 options.dtype == Dtype::kBf16 ? at::kBFloat16 : at::kFloat,
                                 at::empty({options.seq, spec.head_dim}, at::kFloat),
                                 at::empty({options.seq, spec.head_dim}, at::kFloat),
                                 false,
                                 {}}),
      memory_(memory) {
  ops::rope_tables(spec.rope_theta, shared_->rope_cos, shared_->rope_sin);
}

Executor::~Executor() = default;

void Executor::open(int slot, int stage, const MicrobatchInput& input) {
  BGL_CHECK(slot >= 0 && stage >= 0 && static_cast<size_t>(stage) < stages_.size(), slot, stage);
  const ExecutorStage& of = stages_[stage];
  const std::vector<OpSpec>& ops = of.graph->ops;
  const int64_t tokens = of.graph->tokens;
  BGL_CHECK(ops.front().kind != OpKind::kEmbedding || input.ids.numel() == tokens, tokens);
  BGL_CHECK(ops.back().kind != OpKind::kLmHead || input.targets.numel() == tokens, tokens);
  while (slots_.size() <= static_cast<size_t>(slot)) {
    slots_.push_back(std::make_unique<MicrobatchContext>(*shared_, memory_));
  }
  slots_[slot]->open(of, input);
  for (ExecutorObserver* one : observers_) one->on_open(slot, of, input);
}

void Executor::set_plan(int slot, const Plan& plan) { context(slot).set_plan(plan); }

void Executor::run(const RankTimeline& timeline, size_t begin) {
  for (size_t i = begin; i < timeline.size(); ++i) run_action(timeline[i]);
}

void Executor::run(int slot, const Timeline& timeline, size_t begin) {
  for (size_t i = begin; i < timeline.size(); ++i) run_action({slot, timeline[i]});
}

void Executor::run_action(const StageAction& action) {
  MicrobatchContext& of = context(action.slot);
  if (observers_.empty()) return of.run(action.action);
  const int64_t begin_ns = steady_now_ns();
  of.run(action.action);
  const int64_t end_ns = steady_now_ns();
  const ActionKind kind = action.action.kind;
  const int id = action.action.id;
  if (kind == ActionKind::kForwardEnd || kind == ActionKind::kBackwardEnd) {
    const ActionKind issue =
        kind == ActionKind::kForwardEnd ? ActionKind::kForward : ActionKind::kBackward;
    for (ExecutorObserver* one : observers_) {
      one->on_comm({action.slot, {issue, id}}, of.last_comm());
    }
  } else if (kind == ActionKind::kForward && shared_->ep.size() > 1 &&
             of.graph().ops[id].kind == OpKind::kRouter) {
    for (ExecutorObserver* one : observers_) one->on_comm(action, shared_->ep.last_blocking());
  } else if (kind == ActionKind::kOffload || kind == ActionKind::kReload) {
    const auto [ticket, bytes] = of.store().last_copy(id);
    for (ExecutorObserver* one : observers_) one->on_copy(action, ticket, bytes);
  }
  for (ExecutorObserver* one : observers_) one->on_action(action, begin_ns, end_ns);
}

MicrobatchResult Executor::close(int slot) {
  MicrobatchResult result = context(slot).close();
  for (ExecutorObserver* one : observers_) one->on_close(slot);
  return result;
}

void Executor::abort_all() noexcept {
  // Communication of all first: a rank's later one may be what a peer needs to end an earlier one.
  for (const auto& each : slots_) each->abandon_communication();
  for (const auto& each : slots_) each->abort();
  shared_->capture = false;
  shared_->captured.reset();
}

bool Executor::is_open(int slot) const {
  return slot >= 0 && static_cast<size_t>(slot) < slots_.size() && slots_[slot]->is_open();
}

int Executor::open_slots() const {
  int open = 0;
  for (const auto& each : slots_) open += each->is_open() ? 1 : 0;
  return open;
}

const LayerRouting& Executor::routing(int slot, int layer) const {
  return context(slot).routing(layer);
}

const ActivationStore& Executor::store(int slot) const {
  BGL_CHECK(slot >= 0 && static_cast<size_t>(slot) < slots_.size(), slot);
  return slots_[slot]->store();
}

const Graph& Executor::graph(int slot) const { return context(slot).graph(); }

void Executor::capture_log_probs() { shared_->capture = true; }

at::Tensor Executor::take_log_probs() { return std::exchange(shared_->captured, {}); }

MicrobatchContext& Executor::context(int slot) const {
  BGL_CHECK(is_open(slot), slot);
  return *slots_[slot];
}

}  // namespace bagualu
