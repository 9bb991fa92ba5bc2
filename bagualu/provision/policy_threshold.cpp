// threshold: the documented rule of MindSpeed. A layer whose hottest rank got more than `threshold`
// times the mean recomputes its expert intermediates; budget and peak play no part.
#include <memory>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/provision/planning_policy.h"

namespace bagualu {
namespace {

class Threshold final : public PlanningPolicy {
 public:
  Threshold(const ProvisionContext& context, double threshold)
      : PlanningPolicy(context), threshold_(threshold), calm_(uniform_plan(graph_, kSave)) {}

  std::string_view name() const override { return "threshold"; }

  Decision decide(const GateInput& input) override {
    Plan plan = calm_;
    keep_past_choices(graph_, *input.state, plan);
    const Plan before = plan;
    if (input.gate >= 0 && input.load_imbalance > threshold_) {
      const int layer = graph_.gates[static_cast<size_t>(input.gate)].layer;
      for (size_t u = 0; u < graph_.units.size(); ++u) {
        const UnitSpec& unit = graph_.units[u];
        if (unit.layer == layer && is_expert_intermediate(unit)) {
          plan.residency[u] = kRecompute;
        }
      }
    }
    const bool mitigated = plan != before;
    Decision decision = describe(input, std::move(plan));
    decision.mitigated = mitigated;
    if (mitigated) {
      decision.needed_bytes = predictor_.excess_bytes(predictor_.predict(input, before));
    }
    return decision;
  }

 private:
  // The native profile rebuilds them in pieces, the megatron profile operator by operator.
  bool is_expert_intermediate(const UnitSpec& unit) const {
    return unit.rebuild == Rebuild::kInPieces ||
           (unit.rebuild == Rebuild::kOp &&
            (is_made_by(graph_, unit, "expert_fc1") || is_made_by(graph_, unit, "moe_act")));
  }

  const double threshold_;
  const Plan calm_;
};

}  // namespace

std::unique_ptr<Policy> make_threshold(const ProvisionContext& context,
                                       const PolicyOptions& options) {
  if (!(options.threshold > 0.0)) {
    throw InvalidInput("options", "threshold", std::to_string(options.threshold), "above 0");
  }
  return std::make_unique<Threshold>(context, options.threshold);
}

}  // namespace bagualu
