// full-recompute: everything that can be rebuilt is rebuilt. What cannot (rows behind a collective,
// layer outputs) is kept, and offloaded where that is needed to survive.
#include <algorithm>
#include <memory>
#include <utility>

#include "bagualu/provision/floor.h"
#include "bagualu/provision/in_flight.h"
#include "bagualu/provision/planning_policy.h"

namespace bagualu {
namespace {

class FullRecompute final : public PlanningPolicy {
 public:
  explicit FullRecompute(const ProvisionContext& context)
      : PlanningPolicy(context),
        plan_(uniform_plan(graph_, kRecompute)),
        rest_bytes_(rest_bytes(graph_, plan_, every_layer(graph_, context.balanced))),
        search_(context_, predictor_) {}

  std::string_view name() const override { return "full-recompute"; }

  Decision decide(const GateInput& all_saved) override {
    const GateInput input = with_own_forecast(all_saved);
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
  // Micro-batches to come are forecast as if they saved everything; here they never do.
  GateInput with_own_forecast(GateInput input) const {
    const auto later = std::count(input.ahead.begin(), input.ahead.end(), PassKind::kForward);
    input.backward_resting_bytes = std::min(input.backward_resting_bytes, later * rest_bytes_);
    return input;
  }

  const Plan plan_;
  const int64_t rest_bytes_;  ///< of a micro-batch under it
  PlanSearch search_;
};

}  // namespace

std::unique_ptr<Policy> make_full_recompute(const ProvisionContext& context) {
  return std::make_unique<FullRecompute>(context);
}

}  // namespace bagualu
