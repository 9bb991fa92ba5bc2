#include "bagualu/runtime/microbatch_runner.h"

#include <algorithm>
#include <chrono>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// Everything is given up at its last forward use, whatever its kind: a backward never comes.
Plan evaluation_plan(const Graph& graph) {
  Plan plan;
  plan.residency.assign(graph.units.size(), kRecompute);
  return plan;
}

}  // namespace

MicrobatchRunner::MicrobatchRunner(const Graph& graph, Executor& executor, DeviceArena& arena,
                                   HostArena& host)
    : graph_(graph), dependence_(graph), executor_(executor), arena_(arena), host_(host) {}

MicrobatchReport MicrobatchRunner::train(const MicrobatchInput& input, Policy& policy,
                                         const LayerLoad& balanced) {
  arena_.mark_peak();
  host_.reset_peak();
  executor_.begin(input);
  try {
    return train_open(policy, balanced);
  } catch (...) {
    executor_.abort();
    throw;
  }
}

MicrobatchReport MicrobatchRunner::train_open(Policy& policy, const LayerLoad& balanced) {
  MicrobatchReport report;
  report.base_bytes = arena_.live_bytes();
  state_ = initial_state(graph_);
  timeline_.clear();
  loads_.assign(graph_.layers, balanced);
  table_ = memory_table(graph_, loads_);
  memory_ = {};
  plan_ = uniform_plan(graph_, kSave);
  decide(policy, -1, report);
  for (size_t begin = 0;;) {
    const int gate = append_forward(graph_, plan_, state_, timeline_);
    if (gate < 0) append_backward(graph_, plan_, state_, timeline_);
    run_segment(begin, report);
    if (gate < 0) break;
    const int layer = graph_.gates[gate].layer;
    loads_[layer] = executor_.routing(layer).load;
    update_layer(graph_, dependence_, layer, loads_[layer], table_);
    begin = timeline_.size();
    decide(policy, gate, report);
    append_demotions(graph_, plan_, state_, timeline_);
  }
  report.plan = plan_;
  report.losses = executor_.finish(report.store);
  report.measured_peak_bytes = arena_.peak_bytes();
  report.host_peak_bytes = host_.peak_bytes();
  return report;
}

void MicrobatchRunner::decide(Policy& policy, int gate, MicrobatchReport& report) {
  GateInput input;
  input.gate = gate;
  input.state = &state_;
  input.plan = &plan_;
  input.loads = &loads_;
  input.memory = memory_;
  if (gate >= 0) {
    input.load_imbalance = executor_.routing(graph_.gates[gate].layer).load_imbalance;
  }
  const int64_t begin = now_ns();
  Decision decision = policy.decide(input);
  keep_past_choices(graph_, state_, decision.plan);
  DecisionRecord record;
  record.gate = gate;
  record.duration_ns = now_ns() - begin;
  record.cache_hit = decision.cache_hit;
  record.mitigated = decision.mitigated;
  record.load_imbalance = input.load_imbalance;
  record.needed_bytes = decision.needed_bytes;
  record.exposed_ns = decision.exposed_ns;
  for (size_t u = 0; u < graph_.units.size(); ++u) {
    if (decision.plan.residency[u] != plan_.residency[u] && decision.plan.residency[u] != kSave) {
      record.changed_units.push_back(static_cast<int>(u));
    }
  }
  report.decisions.push_back(std::move(record));
  report.repeat_step = report.repeat_step || decision.repeat_step;
  plan_ = std::move(decision.plan);
}

void MicrobatchRunner::run_segment(size_t begin, MicrobatchReport& report) {
  // The prediction is made before the segment runs, from counts and the plan alone.
  replay_memory(graph_, plan_, table_, timeline_, begin, memory_);
  report.predicted_peak_bytes = report.base_bytes + memory_.peak_bytes;
  executor_.run(timeline_, begin, plan_);
  const int64_t difference = arena_.live_bytes() - report.base_bytes - memory_.live_bytes;
  report.unaccounted_bytes = std::max(report.unaccounted_bytes, std::abs(difference));
}

MicrobatchLosses MicrobatchRunner::evaluate(const MicrobatchInput& input) {
  executor_.begin(input);
  try {
    plan_ = evaluation_plan(graph_);
    state_ = initial_state(graph_);
    timeline_.clear();
    for (size_t begin = 0; begin == 0 || state_.next_op < static_cast<int>(graph_.ops.size());
         begin = timeline_.size()) {
      append_forward(graph_, plan_, state_, timeline_);
      executor_.run(timeline_, begin, plan_);
    }
    ActivationStoreStats ignored;
    return executor_.finish(ignored);
  } catch (...) {
    executor_.abort();
    throw;
  }
}

void MicrobatchRunner::record_memory(std::vector<MemorySample>* samples) {
  if (samples == nullptr) {
    executor_.set_observer({});
    return;
  }
  const int64_t begin = now_ns();
  executor_.set_observer([this, samples, begin](const Action& action, int64_t) {
    samples->push_back({now_ns() - begin, arena_.live_bytes(), action_text(graph_, action)});
  });
}

}  // namespace bagualu
