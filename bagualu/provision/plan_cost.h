#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/provision/policy.h"

namespace bagualu {

/// Exposed time of one unit's residency under a plan's flags: the residency's own price, and the
/// part of its copies that would have run beside compute but is waited for because the plan drains
/// at once (or `drains_now`: demoted at a gate) or reloads only when needed.
int64_t unit_cost_ns(const ProvisionContext& context, const std::vector<LayerLoad>& loads, int unit,
                     ResidencyId residency, bool drains_now, bool prefetch);

/// Exposed time of a whole plan over save-all, choices of the past included.
/// `state` tells which offloads would be demotions.
int64_t plan_cost_ns(const ProvisionContext& context, const std::vector<LayerLoad>& loads,
                     const MicrobatchState& state, const Plan& plan);

}  // namespace bagualu
