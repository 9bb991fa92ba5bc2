// static: one plan for the whole run, from a file or fitted once. What every framework does today.
#include <memory>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/provision/floor.h"
#include "bagualu/provision/planning_policy.h"

namespace bagualu {
namespace {

class Static final : public PlanningPolicy {
 public:
  Static(const ProvisionContext& context, const PolicyOptions& options) : PlanningPolicy(context) {
    plan_ = options.plan.is_null() ? fitted(options.static_fit_imbalance) : given(options.plan);
  }

  std::string_view name() const override { return "static"; }
  Decision decide(const GateInput& input) override { return describe(input, plan_); }

 private:
  Plan given(const Json& json) const {
    Plan plan = plan_from_json(graph_, json, "plan");
    for (size_t u = 0; u < graph_.units.size(); ++u) {
      const ResidencySpec& choice = residencies()[plan.residency[u]];
      if (!choice.changes_numerics || context_.allow_quantise) continue;
      throw InvalidInput("plan", "units." + graph_.units[u].name, std::string(choice.name),
                         "a residency that keeps the numbers, unless quantising is allowed");
    }
    return plan;
  }

  // The cheapest plan that fits with every layer at `factor` times the balanced load.
  Plan fitted(double factor) {
    if (!(factor > 0.0)) {
      throw InvalidInput("options", "static_fit_imbalance", std::to_string(factor), "above 0");
    }
    const MicrobatchState state = initial_state(graph_);
    const std::vector<LayerLoad> loads(static_cast<size_t>(graph_.layers),
                                       scaled_load(context_.balanced, context_.worst_case, factor));
    GateInput input;
    input.state = &state;
    input.loads = &loads;
    Plan calm = uniform_plan(graph_, kSave);
    input.plan = &calm;
    if (describe(input, calm).feasible) return calm;
    PlanSearch search(context_, predictor_);
    SearchResult result = search.cheapest(input, calm, {});
    if (!result.found) result = search.last_resort(input, calm);
    return std::move(result.plan);
  }

  Plan plan_;
};

}  // namespace

std::unique_ptr<Policy> make_static(const ProvisionContext& context, const PolicyOptions& options) {
  return std::make_unique<Static>(context, options);
}

}  // namespace bagualu
