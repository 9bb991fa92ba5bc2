// A scenario: what is trained, on which machine, with which routing, and what may go wrong. Files:
// configs/scenarios/*.json, docs/formats.md (Scenario).
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cost/system.h"
#include "bagualu/model/job.h"
#include "bagualu/model/routing_source.h"
#include "bagualu/sim/stage_model.h"

namespace bagualu {

/// What a run costs beside its steps.
struct Interruptions {
  double restart_s = 284;             ///< cold restart (the paper's figure), after an OOM too
  int64_t checkpoint_interval = 500;  ///< iterations
  double checkpoint_s = 10;           ///< that the job stands still for
  double failures_per_day = 0;        ///< of the whole job, for reasons other than memory
};

struct Scenario {
  std::string name;
  std::string source;  ///< where shapes and sizes come from; what is assumed
  Job job;
  SystemSpec system;
  int64_t budget_bytes = 0;       ///< of a device, static bytes included; 0: all of its memory
  int64_t host_budget_bytes = 0;  ///< of a rank; 0: no limit
  RoutingShape routing;           ///< made up; or
  std::filesystem::path trace;    ///< recorded
  int64_t iterations = 1000;
  uint64_t seed = 0;
  Interruptions interruptions;
  std::vector<SimPolicy> policies;
};

/// The settings each rival's own paper would choose for this job and budget, and how they were
/// found: docs/evaluation.md.
SimPolicy published_settings(const std::string& policy, const Job& job, const SystemSpec& system,
                             int64_t budget_bytes);

/// "full recompute", "+ per operator", "+ dynamic", "+ overlap": each adds one mechanism.
std::vector<SimPolicy> ablation_policies();

/// The scenario's routing for its expert groups.
std::unique_ptr<RoutingSource> routing_of(const Scenario& scenario);

/// A name of configs/scenarios or a file.
/// Throws: InvalidInput(file, field, found, allowed) for unknown keys and policies, units that do
///         not fit ("64GiB", "10s"), layouts that do not divide, traces with too few ranks: one
///         line that says what is allowed.
Scenario scenario_from_json(const Json& object, const std::filesystem::path& folder,
                            const std::string& where);
Scenario scenario_from_file(const std::filesystem::path& path);

}  // namespace bagualu
