// adaptive: nothing in calm; in a spike the plan of least exposed time that fits, for as long as the
// spike lasts. Later layers are forecast as balanced; if they are not, later gates demote.
#include <memory>
#include <utility>

#include "bagualu/provision/plan_cache.h"
#include "bagualu/provision/planning_policy.h"

namespace bagualu {
namespace {

class Adaptive final : public PlanningPolicy {
 public:
  explicit Adaptive(const ProvisionContext& context)
      : PlanningPolicy(context),
        calm_(uniform_plan(graph_, kSave)),
        search_(context_, predictor_) {}

  std::string_view name() const override { return "adaptive"; }

  Decision decide(const GateInput& input) override {
    predictor_.set_loads(*input.loads);
    calm_key(input, key_);
    const CachedPlan* calm = cache_.find(key_);
    const bool calm_hit = calm != nullptr;
    if (!calm_hit) {
      Plan plan = calm_;
      keep_past_choices(graph_, *input.state, plan);
      Timeline rest = predictor_.rest_of(input, plan);
      cache_.insert(key_, {std::move(plan), std::move(rest)});
      calm = cache_.find(key_);
    }
    const Prediction prediction = predictor_.predict(input, calm->plan, calm->rest);
    if (predictor_.fits(prediction)) {
      Decision decision = describe(input, calm->plan, prediction);
      decision.cache_hit = calm_hit;
      return decision;
    }
    const int64_t needed = predictor_.excess_bytes(prediction);
    Decision decision = mitigate(input, Plan(calm->plan));
    decision.needed_bytes = needed;
    decision.mitigated = true;
    return decision;
  }

 private:
  Decision mitigate(const GateInput& input, const Plan& calm) {
    mitigation_key(input, key_);
    if (const CachedPlan* cached = cache_.find(key_)) {
      Decision decision = describe(input, cached->plan);
      decision.cache_hit = decision.feasible;
      if (decision.feasible) return decision;
    }
    SearchResult result = solve(input, calm);
    Decision decision = describe(input, result.plan, result.prediction);
    if (result.found) cache_.insert(key_, {std::move(result.plan), {}});
    return decision;
  }

  // A plan must fit the forecast and leave the way to the survival plan open: what it offloads has
  // to come back at once in backward, and encoded copies stay. The first plan that does both wins.
  SearchResult solve(const GateInput& input, const Plan& calm) {
    SearchResult cheapest = search_.cheapest(input, calm, {});
    if (cheapest.found && predictor_.survives_worst_case(input, cheapest.plan)) return cheapest;
    SearchResult safe = search_.cheapest(input, calm, {.survival_only = true});
    if (safe.found && predictor_.survives_worst_case(input, safe.plan)) return safe;
    SearchResult last = search_.last_resort(input, calm);
    if (last.found && predictor_.survives_worst_case(input, last.plan)) return last;
    // The budget is below the floor. Forecast loads may still go well.
    if (cheapest.found) return cheapest;
    return safe.found ? safe : last;
  }

  const Plan calm_;
  PlanSearch search_;
  PlanCache cache_;
  PlanKey key_;
};

}  // namespace

std::unique_ptr<Policy> make_adaptive(const ProvisionContext& context) {
  return std::make_unique<Adaptive>(context);
}

}  // namespace bagualu
