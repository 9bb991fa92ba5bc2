// Provisioning: what is known after a gate in, a Plan out. Start here.
//
// Glossary
//   budget    device bytes of this rank, of which `activation_budget_bytes` are left for one
//             micro-batch's storages and workspaces after static memory.
//   floor     the least budget under which any routing within the bound survives (floor.h).
//   demotion  giving up, at a gate, a storage that an earlier decision kept.
// Invariants
//   decide() reads logical state only (no clock, no random number): same input, same plan.
//   A plan of `adaptive` that is reported feasible never exceeds the budget for the loads given.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cost/op_cost.h"
#include "bagualu/provision/in_flight.h"
#include "bagualu/schedule/pipeline.h"
#include "bagualu/schedule/replay.h"
#include "bagualu/schedule/timeline.h"

namespace bagualu {

/// What never changes during a run.
struct ProvisionContext {
  const Graph* graph = nullptr;
  const CostTable* cost = nullptr;
  int64_t activation_budget_bytes = 0;  ///< 0 = no limit
  int64_t host_budget_bytes = 0;        ///< 0 = no limit
  LayerLoad balanced;    ///< a layer's load when routing is even: forecast of later layers
  LayerLoad worst_case;  ///< the bound
  bool allow_quantise = false;
};

/// A micro-batch between its forward and its backward.
struct RestingMicrobatch {
  const MicrobatchState* state = nullptr;
  const Plan* plan = nullptr;
  const std::vector<LayerLoad>* loads = nullptr;
  MicrobatchBytes bytes;  ///< as it stands
  MicrobatchBytes least;  ///< once the survival plan takes it over
};

/// What is known at one decision.
/// Units: load_imbalance = hottest rank's rows over the mean, this layer, this micro-batch.
struct GateInput {
  int gate = -1;  ///< index in graph.gates; -1: before the micro-batch's first operator
  const MicrobatchState* state = nullptr;
  const Plan* plan = nullptr;  ///< in force so far
  const std::vector<LayerLoad>* loads =
      nullptr;          ///< real for layers up to this gate, `balanced` beyond
  MemoryReplay memory;  ///< live and peak bytes now, without static ones
  double load_imbalance = 1.0;

  /// In a pipeline: the other micro-batches in flight on this rank, oldest first. Their bytes are
  /// part of memory.live_bytes.
  std::vector<RestingMicrobatch> resting;
  /// In a pipeline: the rank's passes after this forward, up to this micro-batch's backward. A
  /// backward is that of the oldest in flight, a forward that of a new micro-batch. Empty: this
  /// micro-batch's backward comes next.
  std::vector<PassKind> ahead;
  int64_t resting_bytes = 0;
  int64_t least_resting_bytes = 0;  ///< of the same ones, if the survival plan took them over now
  /// Of those that will be in flight when this micro-batch's backward runs: forecast, and if the
  /// survival plan holds them at the worst case.
  int64_t backward_resting_bytes = 0;
  int64_t least_backward_resting_bytes = 0;
};

struct Decision {
  Plan plan;
  std::vector<Plan> resting_plans;  ///< by input.resting; empty: they stay as they are
  bool feasible = true;             ///< predicted peak fits (policies without foresight: as found)
  int64_t short_by_bytes = 0;       ///< missing bytes if not feasible
  int64_t predicted_peak_bytes =
      0;                     ///< rest of the micro-batch included, forecast loads beyond the gate
  int64_t exposed_ns = 0;    ///< predicted extra time of this plan over save-all
  int64_t bound_ns = 0;      ///< adaptive, not from the cache: no plan exposes less
  bool cache_hit = false;    ///< adaptive: no search, the plan was known and replayed anew
  bool mitigated = false;    ///< the plan differs from what the policy does in calm
  int64_t needed_bytes = 0;  ///< by how much the calm plan would exceed the budget
  /// The step's gradients are to be thrown away and the step run once more with full recompute;
  /// exposed_ns then includes this micro-batch's repetition, not those of the step's others.
  bool repeat_step = false;
};

class Policy {
 public:
  virtual ~Policy() = default;
  virtual std::string_view name() const = 0;
  /// Requires: input.gate = -1 at the start of every micro-batch, then every gate in order.
  virtual Decision decide(const GateInput& input) = 0;
};

struct PolicyOptions {
  Json plan = {};                     ///< static: a plan file's content; null = fit one
  double static_fit_imbalance = 1.2;  ///< static: load factor the fitted plan must survive
  std::vector<std::string> recompute_modules = {};  ///< selective: Megatron's names
  double threshold = 2.0;                           ///< threshold: load_imbalance that triggers
  double adapipe_fit_imbalance = 1.2;               ///< adapipe: load factor its plan must survive
  int64_t adapipe_in_flight = 1;  ///< adapipe: micro-batches that share the budget
  /// kwai: fraction of the saved bytes that are not recomputed; none = the smallest that fits
  std::optional<double> kwai_offload_ratio = {};
  double kwai_fit_imbalance = 1.2;  ///< kwai: load factor its ratio must survive
  double retry_factor = 1.10;       ///< retry: load factor its buffers hold
};

/// The names make_policy() knows.
const std::vector<std::string>& policy_names();

/// Throws: InvalidInput for an unknown name (listing the names) or options that name nothing.
std::unique_ptr<Policy> make_policy(std::string_view name, const ProvisionContext& context,
                                    const PolicyOptions& options);

}  // namespace bagualu
