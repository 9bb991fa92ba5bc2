// retry: Megatron's rule for its paged stash. Buffers are sized for `retry_factor` times the
// balanced load and everything is saved in them. A layer that gets more overflows them, and the
// whole step is repeated once, this time with recompute. What is left of the micro-batch that
// overflowed is thrown away, so it goes on under the survival plan, only to reach the step's end.
#include <memory>
#include <utility>

#include "bagualu/provision/floor.h"
#include "bagualu/provision/plan_cost.h"
#include "bagualu/provision/planning_policy.h"

namespace bagualu {
namespace {

class Retry final : public PlanningPolicy {
 public:
  Retry(const ProvisionContext& context, double factor)
      : PlanningPolicy(context),
        most_rows_(scaled_load(context_.balanced, context_.worst_case, factor).rows),
        calm_(uniform_plan(graph_, kSave)),
        again_(uniform_plan(graph_, kRecompute)),
        survival_(survival_plan(graph_)) {}

  std::string_view name() const override { return "retry"; }

  Decision decide(const GateInput& input) override {
    const bool overflow = overflowed(input);
    Plan plan = overflow ? survival_ : calm_;
    keep_past_choices(graph_, *input.state, plan);
    if (!overflow) return describe(input, std::move(plan));
    Plan before = calm_;
    keep_past_choices(graph_, *input.state, before);
    Decision decision = describe(input, std::move(plan));
    decision.mitigated = true;
    decision.repeat_step = true;
    decision.exposed_ns += repetition_ns(*input.loads);
    decision.needed_bytes = predictor_.excess_bytes(predictor_.predict(input, before));
    return decision;
  }

 private:
  // Loads up to this gate are real, so no memory of earlier decisions is needed.
  bool overflowed(const GateInput& input) const {
    for (int g = 0; g <= input.gate; ++g) {
      const int layer = graph_.gates[static_cast<size_t>(g)].layer;
      if ((*input.loads)[static_cast<size_t>(layer)].rows > most_rows_) return true;
    }
    return false;
  }

  // This micro-batch once more, with recompute; the step's other ones are not known here.
  int64_t repetition_ns(const std::vector<LayerLoad>& loads) const {
    int64_t sum = plan_cost_ns(context_, loads, initial_state(graph_), again_);
    for (size_t i = 0; i < graph_.ops.size(); ++i) {
      const LayerLoad& load = graph_.load_of(graph_.ops[i].layer, loads);
      const auto op = static_cast<int>(i);
      sum += context_.cost->forward_ns(graph_, op, load);
      if (graph_.ops[i].has_backward) sum += context_.cost->backward_ns(graph_, op, load);
    }
    return sum;
  }

  const int64_t most_rows_;
  const Plan calm_;
  const Plan again_;
  const Plan survival_;
};

}  // namespace

std::unique_ptr<Policy> make_retry(const ProvisionContext& context, const PolicyOptions& options) {
  check_factor("retry_factor", options.retry_factor);
  return std::make_unique<Retry>(context, options.retry_factor);
}

}  // namespace bagualu
