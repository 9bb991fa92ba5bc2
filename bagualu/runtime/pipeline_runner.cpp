#include "bagualu/runtime/pipeline_runner.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/runtime/clock.h"

namespace bagualu {
namespace {

// Everything is given up at its last forward use, whatever its kind: a backward never comes.
Plan evaluation_plan(const Graph& graph) {
  Plan plan;
  plan.residency.assign(graph.units.size(), kRecompute);
  return plan;
}

}  // namespace

PipelineRunner::PipelineRunner(Executor& executor, DeviceArena& arena, HostArena& host,
                               Communicator& ep_group)
    : executor_(executor), arena_(arena), host_(host), ep_group_(ep_group) {}

PipelineRunner::~PipelineRunner() = default;

void PipelineRunner::set_stages(std::vector<RankStage> stages, const RankOptions& options) {
  stages_ = std::move(stages);
  evaluation_plans_.clear();
  for (const RankStage& stage : stages_) {
    evaluation_plans_.push_back(evaluation_plan(*stage.context->graph));
  }
  driver_.reset(new RankDriver(stages_, options, *this));
}

PassesReport PipelineRunner::train(const RankProgram& program, const InputOf& input_of) {
  BGL_CHECK(driver_ != nullptr, "no stages");
  report_ = {};
  slots_.clear();
  input_of_ = &input_of;
  base_bytes_ = arena_.live_bytes();
  arena_.mark_peak();
  host_.reset_peak();
  try {
    finish_reports(driver_->run(program));
  } catch (...) {
    executor_.abort_all();
    throw;
  }
  return std::move(report_);
}

void PipelineRunner::finish_reports(const RankRun& run) {
  for (const RankFlight& flight : run.flights) {
    MicrobatchReport& report = report_of(flight.stage, flight.microbatch);
    report.plan = flight.plan;
    report.repeat_step = flight.repeat_step;
    report.predicted_peak_bytes = base_bytes_ + flight.peak_bytes;
  }
  for (const RankDecision& made : run.decisions) {
    DecisionRecord record;
    record.gate = made.gate;
    record.duration_ns = made.duration_ns;
    record.cache_hit = made.decision.cache_hit;
    record.mitigated = made.decision.mitigated;
    record.load_imbalance = made.load_imbalance;
    record.needed_bytes = made.decision.needed_bytes;
    record.exposed_ns = made.decision.exposed_ns;
    record.changed_units = made.changed_units;
    report_of(made.stage, made.microbatch).decisions.push_back(std::move(record));
  }
  report_.overlapped_segments = run.overlapped_segments;
  report_.serialised_segments = run.serialised_segments;
  report_.deferred_passes = run.deferred_passes;
  report_.undeferred_passes = run.undeferred_passes;
}

int PipelineRunner::stage_index(int stage) const {
  for (size_t i = 0; i < stages_.size(); ++i) {
    if (stages_[i].stage == stage) return static_cast<int>(i);
  }
  throw InternalError("a stage that is not here: " + std::to_string(stage));
}

MicrobatchReport& PipelineRunner::report_of(int stage, int microbatch) {
  const int index = stage_index(stage);
  for (MicrobatchReport& report : report_.microbatches) {
    if (report.stage == index && report.microbatch == microbatch) return report;
  }
  throw InternalError("a micro-batch that did not begin: " + std::to_string(microbatch));
}

MicrobatchReport& PipelineRunner::report_of(const PipelinePass& pass) {
  return report_of(pass.stage, pass.microbatch);
}

void PipelineRunner::open(int slot, int stage, int microbatch) {
  const int index = stage_index(stage);
  executor_.open(slot, index, (*input_of_)(slot, index, microbatch));
  if (slots_.size() <= static_cast<size_t>(slot)) slots_.resize(static_cast<size_t>(slot) + 1);
  slots_[static_cast<size_t>(slot)] = {stage, microbatch};
  MicrobatchReport report;
  report.stage = index;
  report.microbatch = microbatch;
  report.base_bytes = base_bytes_;
  report_.microbatches.push_back(std::move(report));
}

void PipelineRunner::run(const RankTimeline& actions) {
  int last = -1;
  for (const StageAction& action : actions) {
    if (action.slot == last) continue;
    last = action.slot;
    executor_.set_plan(last, driver_->plan_of(last));
  }
  executor_.run(actions);
  // The driver's prediction of these actions was made before they ran, from counts alone.
  const int64_t difference = arena_.live_bytes() - base_bytes_ - driver_->memory().live_bytes;
  unaccounted_bytes_ = std::max(unaccounted_bytes_, std::abs(difference));
}

GateCounts PipelineRunner::counts(int slot, int layer) {
  const LayerRouting& routing = executor_.routing(slot, layer);
  return {routing.load, routing.load_imbalance};
}

bool PipelineRunner::agree(bool mine) {
  const int64_t begin_ns = steady_now_ns();
  const bool all = ep_group_.all_reduce_min(mine ? 1 : 0) == 1;
  if (recorder_ != nullptr) {
    recorder_->add_phase(StepAction::kOther, "vote", begin_ns, steady_now_ns(), &ep_group_);
  }
  return all;
}

void PipelineRunner::close(int slot) {
  MicrobatchResult result = executor_.close(slot);
  const Slot& of = slots_[static_cast<size_t>(slot)];
  MicrobatchReport& report = report_of(of.stage, static_cast<int>(of.microbatch));
  report.losses = result.losses;
  report.store = result.store;
  report.expert_times = result.expert_times;
  report.routing = std::move(result.routing);
}

void PipelineRunner::begin_pass(const PipelinePass&, const PipelinePass*) {
  arena_.mark_peak();
  host_.reset_peak();
  unaccounted_bytes_ = 0;
}

void PipelineRunner::end_pass(const PipelinePass& pass, const PipelinePass* beside) {
  for (const PipelinePass* one : {&pass, beside}) {
    if (one == nullptr) continue;
    MicrobatchReport& report = report_of(*one);
    report.measured_peak_bytes = std::max(report.measured_peak_bytes, arena_.peak_bytes());
    report.host_peak_bytes = std::max(report.host_peak_bytes, host_.peak_bytes());
    report.unaccounted_bytes = std::max(report.unaccounted_bytes, unaccounted_bytes_);
  }
  report_.pass_bytes.push_back({arena_.peak_bytes(), arena_.live_bytes()});
}

void PipelineRunner::deciding() { decision_begin_ns_ = steady_now_ns(); }

void PipelineRunner::decided(RankDecision& made) {
  const int64_t end_ns = steady_now_ns();
  made.duration_ns = end_ns - decision_begin_ns_;
  if (recorder_ != nullptr) {
    recorder_->add_phase(StepAction::kDecide, "decide", decision_begin_ns_, end_ns);
  }
}

MicrobatchLosses PipelineRunner::evaluate(int64_t microbatches, const InputOf& input_of) {
  MicrobatchLosses sum;
  try {
    for (int64_t m = 0; m < microbatches; ++m) {
      const MicrobatchLosses losses = evaluate_microbatch(m, input_of);
      sum.cross_entropy_sum += losses.cross_entropy_sum;
      sum.aux += losses.aux;
      sum.z += losses.z;
    }
  } catch (...) {
    executor_.abort_all();
    throw;
  }
  return sum;
}

// Stage by stage in the model's order: on all ranks together the passes follow one order, so every
// receive is posted by the time its send is awaited. A message between two stages of this rank is
// over once both halves are issued.
MicrobatchLosses PipelineRunner::evaluate_microbatch(int64_t microbatch, const InputOf& input_of) {
  MicrobatchLosses sum;
  std::vector<MicrobatchState> states;
  const auto next_is_here = [this](size_t i) {
    return i + 1 < stages_.size() && stages_[i + 1].stage == stages_[i].stage + 1;
  };
  const auto finish = [&](size_t i) {
    Timeline timeline;
    append_end(*stages_[i].context->graph, evaluation_plans_[i], states[i], timeline);
    executor_.run(static_cast<int>(i), timeline);
    const MicrobatchLosses losses = executor_.close(static_cast<int>(i)).losses;
    sum.cross_entropy_sum += losses.cross_entropy_sum;
    sum.aux += losses.aux;
    sum.z += losses.z;
  };
  for (size_t i = 0; i < stages_.size(); ++i) {
    const int slot = static_cast<int>(i);
    const Graph& graph = *stages_[i].context->graph;
    executor_.open(slot, slot, input_of(slot, slot, microbatch));
    executor_.set_plan(slot, evaluation_plans_[i]);
    states.push_back(initial_state(graph));
    while (!states[i].forward_done(graph)) {
      Timeline timeline;
      append_forward_op(graph, evaluation_plans_[i], states[i], timeline);
      executor_.run(slot, timeline);
      if (states[i].next_op == 1 && i > 0 && next_is_here(i - 1)) finish(i - 1);
    }
    if (!next_is_here(i)) finish(i);
  }
  return sum;
}

}  // namespace bagualu
