#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/provision/policy.h"

namespace bagualu {

/// The survival plan: every unit that can be rebuilt is dropped, every other one is offloaded and
/// drained at once, nothing is prefetched.
Plan survival_plan(const Graph& graph);

struct Floor {
  int64_t activation_bytes = 0;  ///< peak of the survival plan with every layer at the worst case
  int64_t host_bytes = 0;        ///< host bytes that plan needs
  std::string at;                ///< action at the peak
};

/// Source: docs/design.md, "The floor": any state reachable at a gate can be demoted to the
/// survival plan's state there, so a budget of at least the floor is never exceeded by any routing.
///
/// `in_flight` micro-batches share the rank: the others rest under the survival plan.
Floor compute_floor(const Graph& graph, const LayerLoad& worst_case, int in_flight = 1);

/// `factor` times the balanced load, rounded up and cut off at the worst case.
LayerLoad scaled_load(const LayerLoad& balanced, const LayerLoad& worst_case, double factor);

/// One load for every layer of a graph.
std::vector<LayerLoad> every_layer(const Graph& graph, const LayerLoad& load);

/// What a driver tells a policy at gate `gate` (-1: before the first op): the layer's real load is
/// known from now on.
/// Units:   load_imbalance = rows / balanced.rows
void reach_gate(const ProvisionContext& context, int gate, const std::vector<LayerLoad>& loads,
                std::vector<LayerLoad>& known, GateInput& input);

/// One micro-batch driven through all its gates as the runtime does it.
struct DrivenMicrobatch {
  MemoryReplay memory;              ///< peaks really reached, host included
  std::vector<Decision> decisions;  ///< one per decision point: before the first op, then per gate
  Timeline timeline;                ///< the actions a rank would have executed
};

/// Runs `policy` over one micro-batch with these real loads (one per layer); at every gate it sees
/// the loads up to that gate and `balanced` beyond.
/// Units:   load_imbalance is passed on as rows / balanced.rows.
DrivenMicrobatch drive_microbatch(const ProvisionContext& context, Policy& policy,
                                  const std::vector<LayerLoad>& loads);

/// Largest load factor, every layer at it, that `policy_name` survives within the context's budget:
/// 0 if it does not even survive a balanced load scaled to 0, the worst case's factor if it
/// survives everything. Bisection to 1/1000 of the factor.
double largest_surviving_factor(std::string_view policy_name, const ProvisionContext& context,
                                const PolicyOptions& options);

/// As above, for a plan that never changes.
double largest_surviving_factor(const Plan& plan, const ProvisionContext& context);

}  // namespace bagualu
