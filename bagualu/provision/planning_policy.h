#pragma once

#include "bagualu/provision/plan_search.h"
#include "bagualu/provision/policy.h"
#include "bagualu/provision/predictor.h"

namespace bagualu {

/// What the policies of this room share: the context, a predictor, and how a decision is described.
class PlanningPolicy : public Policy {
 protected:
  explicit PlanningPolicy(const ProvisionContext& context);

  /// Describes `plan` with its exact prediction for the loads known now.
  Decision describe(const GateInput& input, Plan plan);
  Decision describe(const GateInput& input, Plan plan, const Prediction& prediction) const;

  const ProvisionContext context_;
  const Graph& graph_;
  Predictor predictor_;
};

std::unique_ptr<Policy> make_save_all(const ProvisionContext& context);
std::unique_ptr<Policy> make_full_recompute(const ProvisionContext& context);
std::unique_ptr<Policy> make_selective(const ProvisionContext& context,
                                       const PolicyOptions& options);
std::unique_ptr<Policy> make_static(const ProvisionContext& context, const PolicyOptions& options);
std::unique_ptr<Policy> make_threshold(const ProvisionContext& context,
                                       const PolicyOptions& options);
std::unique_ptr<Policy> make_adaptive(const ProvisionContext& context);

}  // namespace bagualu
