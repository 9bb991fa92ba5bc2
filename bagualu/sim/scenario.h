// A scenario: what is trained, on which machine, with which routing, and what may go wrong. Files:
// configs/scenarios/*.json, docs/formats.md (Scenario). Start here: scenario_from_file().
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
  int64_t budget_bytes = 0;            ///< of a device, static bytes included; 0: no limit
  int64_t host_budget_bytes = 0;       ///< of a rank; 0: no limit
  RoutingShape routing;                ///< made up; or
  std::filesystem::path trace;         ///< recorded
  int64_t trace_left_out = 0;          ///< records of it that could not be used
  std::filesystem::path routing_file;  ///< that `routing` was read from in place of the scenario's
  int64_t iterations = 1000;
  uint64_t seed = 0;
  Interruptions interruptions;
  std::vector<SimPolicy> policies;  ///< no two of one label
};

/// Load that every rival is set to survive: the limit of the calm iterations that their authors see
/// (97.1 % of them, seed statistics). None of them speaks of spikes.
inline constexpr double kRivalFitImbalance = 1.2;

/// The names that stand for a policy with settings of its own publication.
const std::vector<std::string>& rival_names();

/// The settings each rival's own paper would choose for this job and budget, and how they were
/// found: docs/evaluation.md, Settings of the rivals. Any other policy's name comes back with
/// defaults. A budget of 0 is the device's memory.
/// Requires: job passed validate().
/// Throws:   InvalidInput for an unknown name.
/// Cost:     some ms
SimPolicy published_settings(const std::string& policy, const Job& job, const SystemSpec& system,
                             int64_t budget_bytes);

/// "full recompute", "+ per operator", "+ dynamic", "+ overlap": each adds one mechanism. The
/// second is a plan that never changes, so it has to survive the largest load: `largest_imbalance`.
std::vector<SimPolicy> ablation_policies(double largest_imbalance);

/// The load that a plan must survive to survive this routing's statistics: their largest factor and
/// three standard deviations of a micro-batch around it.
double largest_imbalance(const RoutingShape& shape);

/// The job's expert groups as a source of routing sees them: ranks of tensor-parallel experts are
/// one, layers of the multi-token prediction come behind the model's own.
RoutingGroup routing_group(const Job& job);

/// Complains of a trace that does not fit the job, as routing_of() does, and counts what is left
/// out of one that does. Requires: there is a trace.
void check_trace(Scenario* scenario);

/// The scenario's routing for its expert groups. Reads the trace, if there is one.
/// Throws: InvalidInput(trace file, field) if it has fewer ranks or layers than the group.
std::unique_ptr<RoutingSource> routing_of(const Scenario& scenario);

/// Reads the object. Names of models, strategies and systems are files beside `folder`, or
/// NAME.json in folder/../models (strategies, systems) or in one of configs/models.
/// configs: folders that hold models/, strategies/ and systems/.
/// Throws: InvalidInput(file, field, found, allowed) for unknown keys and policies, units that do
///         not fit ("64GiB", "10s"), layouts that do not divide, traces with too few ranks: one
///         line that says what is allowed.
Scenario scenario_from_json(const Json& object, const std::filesystem::path& folder,
                            const std::string& where,
                            const std::vector<std::filesystem::path>& configs = {});
/// The same of a file; for a name ask resolve_config() with configs/scenarios.
Scenario scenario_from_file(const std::filesystem::path& path,
                            const std::vector<std::filesystem::path>& configs = {});

}  // namespace bagualu
