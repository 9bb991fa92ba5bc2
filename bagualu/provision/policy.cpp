#include "bagualu/provision/policy.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/provision/floor.h"
#include "bagualu/provision/plan_cost.h"
#include "bagualu/provision/planning_policy.h"

namespace bagualu {

PlanningPolicy::PlanningPolicy(const ProvisionContext& context)
    : context_(context), graph_(*context.graph), predictor_(context_) {}

Decision PlanningPolicy::describe(const GateInput& input, Plan plan) {
  predictor_.set_loads(*input.loads);
  const Prediction prediction = predictor_.predict(input, plan);
  return describe(input, std::move(plan), prediction);
}

Decision PlanningPolicy::describe(const GateInput& input, Plan plan,
                                  const Prediction& prediction) const {
  Decision decision;
  decision.feasible = predictor_.fits(prediction);
  decision.short_by_bytes = predictor_.excess_bytes(prediction);
  decision.predicted_peak_bytes = std::max(prediction.peak_bytes, input.memory.peak_bytes);
  decision.exposed_ns = plan_cost_ns(context_, *input.loads, *input.state, plan);
  decision.plan = std::move(plan);
  return decision;
}

Decision PlanningPolicy::describe_start(const std::vector<LayerLoad>& loads, const Plan& plan) {
  const MicrobatchState state = initial_state(graph_);
  GateInput input;
  input.state = &state;
  input.plan = &plan;
  input.loads = &loads;
  return describe(input, plan);
}

std::vector<LayerLoad> PlanningPolicy::loads_at(double factor) const {
  return std::vector<LayerLoad>(static_cast<size_t>(graph_.layers),
                                scaled_load(context_.balanced, context_.worst_case, factor));
}

bool is_made_by(const Graph& graph, const UnitSpec& unit, std::string_view op) {
  if (local_name(unit.name) == op) return true;
  return unit.producer >= 0 && local_name(graph.ops[static_cast<size_t>(unit.producer)].name) == op;
}

std::string_view local_name(std::string_view unit) {
  const size_t dot = unit.find('.');
  return dot == std::string_view::npos ? unit : unit.substr(dot + 1);
}

void check_factor(const char* option, double factor) {
  if (factor > 0.0 && std::isfinite(factor)) return;
  throw InvalidInput("options", option, std::to_string(factor), "above 0");
}

const std::vector<std::string>& policy_names() {
  static const std::vector<std::string> kNames = {"save-all", "full-recompute", "selective",
                                                  "static",   "threshold",      "adapipe",
                                                  "kwai",     "retry",          "adaptive"};
  return kNames;
}

std::unique_ptr<Policy> make_policy(std::string_view name, const ProvisionContext& context,
                                    const PolicyOptions& options) {
  BGL_CHECK(context.graph != nullptr && context.cost != nullptr, name);
  if (name == "save-all") return make_save_all(context);
  if (name == "full-recompute") return make_full_recompute(context);
  if (name == "selective") return make_selective(context, options);
  if (name == "static") return make_static(context, options);
  if (name == "threshold") return make_threshold(context, options);
  if (name == "adapipe") return make_adapipe(context, options);
  if (name == "kwai") return make_kwai(context, options);
  if (name == "retry") return make_retry(context, options);
  if (name == "adaptive") return make_adaptive(context);
  std::string allowed;
  for (const std::string& known : policy_names()) allowed += (allowed.empty() ? "" : ", ") + known;
  throw InvalidInput("options", "policy", std::string(name), allowed);
}

}  // namespace bagualu
