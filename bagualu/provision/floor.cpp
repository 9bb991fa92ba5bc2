#include "bagualu/provision/floor.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

bool fits(const ProvisionContext& context, const MemoryReplay& memory) {
  return (context.activation_budget_bytes == 0 ||
          memory.peak_bytes <= context.activation_budget_bytes) &&
         (context.host_budget_bytes == 0 || memory.host_peak_bytes <= context.host_budget_bytes);
}

double bisect_factor(const ProvisionContext& context,
                     const std::function<bool(const LayerLoad&)>& survives) {
  const auto at = [&](double factor) {
    return survives(scaled_load(context.balanced, context.worst_case, factor));
  };
  if (context.balanced.rows <= 0 || !at(0.0)) return 0.0;
  const double worst_factor =
      static_cast<double>(context.worst_case.rows) / static_cast<double>(context.balanced.rows);
  if (at(worst_factor)) return worst_factor;
  double low = 0.0, high = worst_factor;
  while (high - low > 1e-3) {
    const double middle = 0.5 * (low + high);
    (at(middle) ? low : high) = middle;
  }
  return low;
}

}  // namespace

Plan survival_plan(const Graph& graph) {
  Plan plan = uniform_plan(graph, kRecompute);
  for (size_t u = 0; u < graph.units.size(); ++u) {
    const UnitSpec& unit = graph.units[u];
    if (!unit.pinned && unit.rebuild == Rebuild::kNever) plan.residency[u] = kOffload;
  }
  plan.eager_drain = true;
  plan.prefetch = false;
  return plan;
}

Floor compute_floor(const Graph& graph, const LayerLoad& worst_case, int in_flight) {
  BGL_CHECK(in_flight >= 1, in_flight);
  const std::vector<LayerLoad> loads = every_layer(graph, worst_case);
  const Plan plan = survival_plan(graph);
  const Timeline timeline = build_timeline(graph, plan);
  const MemoryTable table = memory_table(graph, loads);
  MemoryReplay replay;
  replay_memory(graph, plan, table, timeline, 0, replay);
  const MicrobatchBytes one = microbatch_bytes(graph, plan, table);
  Floor floor;
  floor.activation_bytes = replay.peak_bytes + (in_flight - 1) * one.rest_bytes;
  floor.host_bytes = replay.host_peak_bytes + (in_flight - 1) * one.host_rest_bytes;
  if (replay.peak_action >= 0) {
    floor.at = timeline_to_text(graph, {timeline[static_cast<size_t>(replay.peak_action)]});
    floor.at.pop_back();  // the line's end
  }
  return floor;
}

std::vector<LayerLoad> every_layer(const Graph& graph, const LayerLoad& load) {
  return std::vector<LayerLoad>(static_cast<size_t>(graph.layers), load);
}

LayerLoad scaled_load(const LayerLoad& balanced, const LayerLoad& worst_case, double factor) {
  const auto scale = [factor](int64_t rows, int64_t most) {
    return std::min(static_cast<int64_t>(std::ceil(static_cast<double>(rows) * factor)), most);
  };
  return {scale(balanced.rows, worst_case.rows), scale(balanced.piece_rows, worst_case.piece_rows)};
}

void reach_gate(const ProvisionContext& context, int gate, const std::vector<LayerLoad>& loads,
                std::vector<LayerLoad>& known, GateInput& input) {
  input.gate = gate;
  input.load_imbalance = 1.0;
  if (gate < 0) return;
  const auto layer = static_cast<size_t>(context.graph->gates[static_cast<size_t>(gate)].layer);
  known[layer] = loads[layer];
  input.load_imbalance = static_cast<double>(loads[layer].rows) /
                         static_cast<double>(std::max<int64_t>(1, context.balanced.rows));
}

DrivenMicrobatch drive_microbatch(const ProvisionContext& context, Policy& policy,
                                  const std::vector<LayerLoad>& loads) {
  const Graph& graph = *context.graph;
  const MemoryTable table = memory_table(graph, loads);
  DrivenMicrobatch run;
  MicrobatchState state = initial_state(graph);
  std::vector<LayerLoad> known(loads.size(), context.balanced);
  Plan plan = uniform_plan(graph, kSave);
  GateInput input;
  for (int gate = -1;;) {
    input.state = &state;
    input.plan = &plan;
    input.loads = &known;
    input.memory = run.memory;
    reach_gate(context, gate, loads, known, input);
    run.decisions.push_back(policy.decide(input));
    plan = run.decisions.back().plan;
    keep_past_choices(graph, state, plan);
    const size_t begin = run.timeline.size();
    append_demotions(graph, plan, state, run.timeline);
    gate = append_forward(graph, plan, state, run.timeline);
    if (gate < 0) append_backward(graph, plan, state, run.timeline);
    replay_memory(graph, plan, table, run.timeline, begin, run.memory);
    if (gate < 0) return run;
  }
}

double largest_surviving_factor(std::string_view policy_name, const ProvisionContext& context,
                                const PolicyOptions& options) {
  const auto survives = [&](const LayerLoad& load) {
    const std::vector<LayerLoad> loads = every_layer(*context.graph, load);
    const auto policy = make_policy(policy_name, context, options);
    return fits(context, drive_microbatch(context, *policy, loads).memory);
  };
  // These save everything up to a load and little above it, so a load that they survive proves
  // nothing about smaller ones. All other policies hold more the more they get.
  const bool has_trigger = policy_name == "retry" || policy_name == "threshold";
  const double trigger = policy_name == "retry" ? options.retry_factor : options.threshold;
  LayerLoad fullest = scaled_load(context.balanced, context.worst_case, trigger);
  if (policy_name == "threshold") {  // it acts above the factor, and scaled_load() rounds up
    fullest.rows = std::min(
        fullest.rows,
        static_cast<int64_t>(std::floor(static_cast<double>(context.balanced.rows) * trigger)));
  }
  const bool fullest_survives = !has_trigger || survives(fullest);
  return bisect_factor(context, [&](const LayerLoad& load) {
    return (fullest_survives || load.rows <= fullest.rows) && survives(load);
  });
}

double largest_surviving_factor(const Plan& plan, const ProvisionContext& context) {
  const Graph& graph = *context.graph;
  BGL_CHECK(plan.residency.size() == graph.units.size(), plan.residency.size());
  const Timeline timeline = build_timeline(graph, plan);
  return bisect_factor(context, [&](const LayerLoad& load) {
    const std::vector<LayerLoad> loads = every_layer(graph, load);
    MemoryReplay replay;
    replay_memory(graph, plan, memory_table(graph, loads), timeline, 0, replay);
    return fits(context, replay);
  });
}

}  // namespace bagualu
