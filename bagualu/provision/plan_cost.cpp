#include "bagualu/provision/plan_cost.h"

#include <algorithm>
#include <cmath>

#include "bagualu/cost/residency_pricing.h"

namespace bagualu {
namespace {

// True if an offload of this unit would be issued now, at a gate, and not after a forward use.
bool would_demote(const Graph& graph, int unit, const MicrobatchState& state) {
  for (int s : graph.units[unit].storages) {
    if (state.storage[s] == StorageFate::kLive && graph.last_forward_read[s] < state.next_op) {
      return true;
    }
  }
  return false;
}

bool was_given_up(const Graph& graph, int unit, const MicrobatchState& state) {
  for (int s : graph.units[unit].storages) {
    if (state.storage[s] != StorageFate::kLive && state.storage[s] != StorageFate::kAbsent) {
      return true;
    }
  }
  return false;
}

}  // namespace

int64_t unit_cost_ns(const ProvisionContext& context, const std::vector<LayerLoad>& loads, int unit,
                     ResidencyId residency, bool drains_now, bool prefetch) {
  if (residency == kSave) return 0;
  const Graph& graph = *context.graph;
  const CostTable& cost = *context.cost;
  const LayerLoad& load = graph.load_of(graph.units[unit].layer, loads);
  const int64_t own = cost.residency_ns(graph, unit, residency, load);
  if (residencies()[residency].retire != Retire::kOffload || (!drains_now && prefetch)) return own;
  const int64_t bytes = graph.unit_bytes(unit, load);
  const int64_t waited = (drains_now ? transfer_ns(bytes, cost.d2h_bytes_per_s) : 0) +
                         (prefetch ? 0 : transfer_ns(bytes, cost.h2d_bytes_per_s));
  const double hidden = std::clamp(cost.copy_hidden_fraction, 0.0, 1.0);
  return own + static_cast<int64_t>(static_cast<double>(waited) * hidden);
}

int64_t plan_cost_ns(const ProvisionContext& context, const std::vector<LayerLoad>& loads,
                     const MicrobatchState& state, const Plan& plan) {
  int64_t sum = 0;
  for (int u = 0; u < static_cast<int>(plan.residency.size()); ++u) {
    if (plan.residency[u] == kSave) continue;
    const bool past = was_given_up(*context.graph, u, state);
    const bool drains_now = !past && (plan.eager_drain || would_demote(*context.graph, u, state));
    sum += unit_cost_ns(context, loads, u, plan.residency[u], drains_now, plan.prefetch);
  }
  return sum;
}

}  // namespace bagualu
