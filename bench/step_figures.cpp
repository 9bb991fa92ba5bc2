// For bench/overlap_bench.py: what the traces of a run's ranks say. Prints one JSON object.
//   steps     by traced step: measured and predicted time, the latter from the steps
//             around it; each rank's compute, communication, copies and waiting
//   order     "equal", or where a rank's passes or a communicator's order differ from the plan's
// Usage: step_figures --order 1f1b --pp 2 --dp 2 --micro-batches 8 [--virtual V] [--overlap]
// FILE...
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/schedule/overlap_order.h"
#include "bagualu/schedule/step_replay.h"

namespace bagualu {
namespace {

using Steps = std::map<int64_t, std::vector<RankStep>>;

struct Shape {
  std::string order = "1f1b";
  int pp = 1;
  int dp = 1;
  int microbatches = 1;
  int virtual_per_rank = 1;
  bool overlap = false;
};

bool is_forward(StepAction action) {
  return action == StepAction::kForward || action == StepAction::kForwardEnd;
}

bool is_backward(StepAction action) {
  return action == StepAction::kBackward || action == StepAction::kBackwardEnd ||
         action == StepAction::kInputGrad;
}

bool belongs(const StepEvent& event, const PipelinePass& pass) {
  if (event.stage != pass.stage || event.microbatch != pass.microbatch) return false;
  if (pass.kind == PassKind::kForward) return is_forward(event.action);
  return pass.kind != PassKind::kWeightGrad && is_backward(event.action);
}

// Places in the order of passes, a slot's two passes at one.
std::vector<size_t> places(const std::vector<bool>& fused, size_t passes) {
  std::vector<size_t> at(passes, 0);
  for (size_t k = 1; k < passes; ++k) {
    const bool second = k - 1 < fused.size() && fused[k - 1];
    at[k] = at[k - 1] + (second ? 0 : 1);
  }
  return at;
}

// Every forward and backward action stands where its pass stands in the order, and a weight
// gradient behind its own backward and not behind its own pass.
std::string passes_fault(const RankStep& step, const std::vector<PipelinePass>& passes,
                         const std::vector<bool>& fused) {
  const std::vector<size_t> at = places(fused, passes.size());
  size_t now = 0;
  std::set<size_t> seen;
  for (size_t i = 0; i < step.events.size(); ++i) {
    const StepEvent& event = step.events[i];
    for (size_t k = 0; k < passes.size(); ++k) {
      const PipelinePass& pass = passes[k];
      const bool same = event.stage == pass.stage && event.microbatch == pass.microbatch;
      if (same && event.action == StepAction::kWeightGrad && pass.kind == PassKind::kWeightGrad &&
          now > at[k]) {
        return fmt::format("step {}: rank {}: event {}: {} after {}", step.step, step.rank, i,
                           event.name, pass_text(pass));
      }
      if (!belongs(event, pass)) continue;
      if (at[k] < now) {
        return fmt::format("step {}: rank {}: event {}: {} of {} too late", step.step, step.rank, i,
                           event.name, pass_text(pass));
      }
      now = at[k];
      seen.insert(k);
    }
  }
  for (size_t k = 0; k < passes.size(); ++k) {
    if (passes[k].kind == PassKind::kWeightGrad || seen.count(k) > 0) continue;
    return fmt::format("step {}: rank {}: {} missing", step.step, step.rank, pass_text(passes[k]));
  }
  return "";
}

// What a collective is, in words that are the same on all members.
std::map<std::string, std::string> meanings(const RankStep& step) {
  std::map<std::string, std::string> of;
  for (const StepEvent& event : step.events) {
    for (int number : event.issues) {
      const StepTransfer& transfer = step.transfers[static_cast<size_t>(number)];
      if (transfer.key.empty() || transfer.channel.empty()) continue;
      of[transfer.key] = fmt::format("{} of micro-batch {} of stage {}, {}", transfer.name,
                                     event.microbatch, event.stage, step_action_name(event.action));
    }
  }
  return of;
}

// The n-th collective of a communicator is the same on all of its members.
std::string collectives_fault(const std::vector<RankStep>& ranks) {
  std::map<std::string, std::string> known;
  for (const RankStep& rank : ranks) {
    for (const auto& [key, meaning] : meanings(rank)) {
      const auto [entry, added] = known.emplace(key, meaning);
      if (added || entry->second == meaning) continue;
      return fmt::format("step {}: {}: {} on one rank, {} on another", rank.step, key,
                         entry->second, meaning);
    }
  }
  return "";
}

std::string order_fault(const Steps& steps, const Shape& shape) {
  const OverlapOrder order =
      make_overlap_order(parse_pipeline_kind(shape.order, "step_figures", "--order"), shape.pp,
                         shape.virtual_per_rank, shape.microbatches, shape.overlap);
  for (const auto& [number, ranks] : steps) {
    for (const RankStep& rank : ranks) {
      const auto at = static_cast<size_t>(rank.rank / shape.dp);
      std::string fault =
          passes_fault(rank, order.order.ranks[at],
                       order.fused.size() > at ? order.fused[at] : std::vector<bool>());
      if (!fault.empty()) return fault;
    }
    std::string fault = collectives_fault(ranks);
    if (!fault.empty()) return fault;
  }
  return "equal";
}

Json overlap_json(const RankStep& step) {
  const StepOverlap of = step_overlap(step);
  return {{"rank", step.rank},
          {"step_ns", step.end_ns - step.start_ns},
          {"compute_ns", of.compute_ns},
          {"comm_ns", of.comm_ns},
          {"comm_beside_ns", of.comm_beside_ns},
          {"comm_wait_ns", of.comm_wait_ns},
          {"copy_ns", of.copy_ns},
          {"copy_beside_ns", of.copy_beside_ns},
          {"copy_wait_ns", of.copy_wait_ns},
          {"events", step.events.size()}};
}

Json figures(const std::vector<RankStep>& trace, const Shape& shape) {
  Steps steps;
  for (const RankStep& step : trace) steps[step.step].push_back(step);
  const std::vector<StepPrediction> predictions = predict_steps(trace);
  Json list = Json::array();
  for (const auto& [number, ranks] : steps) {
    Json one = {{"step", number}, {"measured_ns", measured_step_ns(ranks)}};
    one["own_times_ns"] = replay_step(ranks, measured_times(ranks)).step_ns;
    if (steps.size() > 1) one["predicted_ns"] = predictions.at(list.size()).predicted_ns;
    for (const RankStep& rank : ranks) one["ranks"].push_back(overlap_json(rank));
    list.push_back(std::move(one));
  }
  return {{"order", order_fault(steps, shape)}, {"steps", std::move(list)}};
}

int run(int argc, char** argv) {
  Shape shape;
  std::vector<std::filesystem::path> files;
  CLI::App app("What the traces of a run's ranks say, as JSON.");
  app.add_option("--order", shape.order);
  app.add_option("--pp", shape.pp);
  app.add_option("--dp", shape.dp, "data-parallel ranks of a stage");
  app.add_option("--micro-batches", shape.microbatches);
  app.add_option("--virtual", shape.virtual_per_rank);
  app.add_flag("--overlap", shape.overlap);
  app.add_option("FILE", files)->required();
  CLI11_PARSE(app, argc, argv);
  std::puts(figures(read_step_trace(files), shape).dump().c_str());
  return 0;
}

}  // namespace
}  // namespace bagualu

int main(int argc, char** argv) {
  try {
    return bagualu::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "step_figures: %s\n", error.what());
    return 1;
  }
}
