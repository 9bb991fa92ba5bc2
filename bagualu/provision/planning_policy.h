#pragma once

#include <memory>
#include <string_view>
#include <vector>

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
  /// The same for a whole micro-batch at these loads.
  Decision describe_start(const std::vector<LayerLoad>& loads, const Plan& plan);
  /// Every layer at `factor` times the balanced load.
  std::vector<LayerLoad> loads_at(double factor) const;

  const ProvisionContext context_;
  const Graph& graph_;
  Predictor predictor_;
};

/// A unit's name without its layer: "core_attn".
std::string_view local_name(std::string_view unit);

/// True if an operator of this name (without its layer) made the unit. In the native profile units
/// are called as their operators, in the megatron profile as their storages.
bool is_made_by(const Graph& graph, const UnitSpec& unit, std::string_view op);

/// Throws: InvalidInput unless a load factor is above 0 and finite.
void check_factor(const char* option, double factor);

std::unique_ptr<Policy> make_save_all(const ProvisionContext& context);
std::unique_ptr<Policy> make_full_recompute(const ProvisionContext& context);
std::unique_ptr<Policy> make_selective(const ProvisionContext& context,
                                       const PolicyOptions& options);
std::unique_ptr<Policy> make_static(const ProvisionContext& context, const PolicyOptions& options);
std::unique_ptr<Policy> make_threshold(const ProvisionContext& context,
                                       const PolicyOptions& options);
std::unique_ptr<Policy> make_adapipe(const ProvisionContext& context, const PolicyOptions& options);
std::unique_ptr<Policy> make_kwai(const ProvisionContext& context, const PolicyOptions& options);
std::unique_ptr<Policy> make_retry(const ProvisionContext& context, const PolicyOptions& options);
std::unique_ptr<Policy> make_adaptive(const ProvisionContext& context);

}  // namespace bagualu
