#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cli/plan_explain.h"
#include "bagualu/cost/system.h"
#include "bagualu/model/layout.h"
#include "bagualu/model/model_spec.h"
#include "bagualu/model/static_memory.h"

namespace bagualu {

/// A question to `bagualu plan`. Loads are factors of the balanced load, every MoE layer at the
/// factor and the hottest rank's rows spread over its experts.
struct PlanRequest {
  ModelSpec model;
  TrainShape shape;
  ParallelLayout layout;
  SystemSpec system;         ///< prices the policies' choices where nothing was measured
  int64_t threads = 1;       ///< compute threads of a rank
  int64_t chunk_rows = 256;  ///< most rows of one expert computed at once
  double imbalance = 1.2;
  int64_t budget_bytes = 0;       ///< 0 = none: nothing is asked of the policies
  int64_t host_budget_bytes = 0;  ///< 0 = no limit
  std::vector<std::string> policies;
  bool explain = false;  ///< list the combinations that the planner looks at
};

/// Highest live bytes of a rank, static ones included, and the action they belong to.
struct PeakBytes {
  int64_t bytes = 0;
  std::string at;
};

/// What the units of one layer keep for backward when everything is saved.
struct LayerBytes {
  int layer = -1;    ///< -1: embedding, final norm, head
  std::string kind;  ///< "moe", "dense", "ends"
  int64_t calm_bytes = 0;
  int64_t loaded_bytes = 0;  ///< at the asked imbalance
};

struct PolicyOutcome {
  std::string policy;
  double largest_imbalance = 0;  ///< that survives the budget; 0: not even an idle one
  PeakBytes peak;                ///< at the asked imbalance
  bool fits = false;             ///< at the asked imbalance
  int64_t exposed_ns = 0;        ///< predicted extra time per micro-batch at the asked imbalance
  bool repeats_step = false;     ///< the whole step would be run twice
};

struct PlanReport {
  StaticMemory static_memory;
  std::vector<LayerBytes> layers;
  PeakBytes calm_peak;    ///< everything saved, balanced load
  PeakBytes loaded_peak;  ///< everything saved, asked imbalance
  PeakBytes floor;        ///< least budget under which any routing survives
  int64_t floor_host_bytes = 0;
  double worst_imbalance = 0;  ///< the largest any routing can cause
  std::vector<PolicyOutcome> policies;
  int64_t short_by_bytes = 0;       ///< budget under the floor; 0: feasible, or no budget given
  int64_t host_short_by_bytes = 0;  ///< the same of the host budget
  std::optional<PlanExplanation> explanation;
};

/// Requires: a request whose model, shape and layout passed validate().
/// Throws:   InvalidInput for an unknown policy.
PlanReport make_plan_report(const PlanRequest& request);

Json to_json(const PlanRequest& request, const PlanReport& report);
void print_table(const PlanRequest& request, const PlanReport& report, std::ostream& out);

}  // namespace bagualu
