// full-recompute: everything that can be rebuilt is rebuilt. What cannot (rows behind a collective,
// layer outputs) is kept, and offloaded where that is needed to survive.
#include <memory>
#include <utility>

#include "bagualu/provision/planning_policy.h"

namespace bagualu {
namespace {

class FullRecompute final : public PlanningPolicy {
 public:
  explicit FullRecompute(const ProvisionContext& context)
      : PlanningPolicy(context),
        plan_(uniform_plan(graph_, kRecompute)),
        search_(context_, predictor_) {}

  std::string_view name() const override { return "full-recompute"; }

  Decision decide(const GateInput& input) override {
    Plan plan = plan_;
    keep_past_choices(graph_, *input.state, plan);
    Decision calm = describe(input, plan);
    if (calm.feasible) return calm;
    SearchResult result = search_.cheapest(input, plan, {.recompute = false});
    if (!result.found) result = search_.last_resort(input, plan);
    Decision decision = describe(input, std::move(result.plan), result.prediction);
    decision.mitigated = true;
    decision.needed_bytes = calm.short_by_bytes;
    return decision;
  }

 private:
  const Plan plan_;
  PlanSearch search_;
};

}  // namespace

std::unique_ptr<Policy> make_full_recompute(const ProvisionContext& context) {
  return std::make_unique<FullRecompute>(context);
}

}  // namespace bagualu
