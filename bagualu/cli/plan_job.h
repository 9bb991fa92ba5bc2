#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cost/system.h"
#include "bagualu/model/job.h"
#include "bagualu/model/routed_loads.h"
#include "bagualu/provision/job_search.h"
#include "bagualu/provision/job_survival.h"
#include "bagualu/schedule/job_memory.h"
#include "bagualu/schedule/job_time.h"

namespace bagualu {

/// A question to `bagualu plan` about a job of another framework.
struct JobPlanRequest {
  Job job;  ///< passed validate()
  SystemSpec system;
  RoutedLoads loads;               ///< what is looked at beside the balanced router
  int64_t budget_bytes = 0;        ///< 0: unknown, nothing is compared
  bool budget_of_system = false;   ///< not asked for: the device's memory
  std::vector<RoutedLoads> trace;  ///< one per recorded iteration
  std::string trace_name;
  int64_t trace_left_out = 0;  ///< records and lines of it that could not be used
  int64_t cold_iterations = 0;  ///< 0: the router is taken as trained
  bool search = false;
  bool search_alone = false;  ///< no layout was asked for: only the search answers
  std::vector<std::string> ignored;  ///< keys of the files that matter to neither memory nor time
  std::vector<std::string> unmodelled;  ///< keys that do, and that the answer leaves out
};

/// One pipeline rank; every rank of its stage is alike but for the routed load.
struct JobRank {
  int64_t pp_rank = 0;
  std::string content;  ///< "Et*4", in Megatron's layout symbols; virtual stages after one another
  int64_t static_bytes = 0;
  RankMemory calm;               ///< balanced router
  RankMemory loaded;             ///< the asked loads
  int64_t worst_bytes = 0;       ///< peak at the largest imbalance there can be
  double survivable_factor = 0;  ///< 0 too if no budget is known
};

/// What one more action would do to the heaviest rank's peak.
struct JobAction {
  std::string name;               ///< "recompute moe_act", "offload expert_fc1"
  int64_t peak_change_bytes = 0;  ///< of the heaviest rank at the asked loads
  int64_t time_change_ns = 0;     ///< of the iteration
  double survivable_factor = 0;   ///< of the weakest rank, with the action
};

struct JobPlanReport {
  std::vector<JobRank> ranks;
  size_t heaviest = 0;  ///< rank with the largest peak at the asked loads
  double worst_imbalance = 1;
  RoutedLoads loads;  ///< the asked ones, without what no routing of this job can cause
  /// Least budget that survives every routing with every layer recomputed.
  int64_t floor_bytes = 0;
  JobTime time;  ///< at the asked loads
  JobTime calm_time;
  std::vector<JobAction> actions;  ///< cheapest way to survive more first
  std::optional<OomForecast> forecast;
  std::optional<OomForecast> cold_forecast;
  std::optional<SearchResult> search;
  int64_t short_by_bytes = 0;  ///< of the heaviest rank at the asked loads; 0: fits
};

JobPlanReport make_job_report(const JobPlanRequest& request);

Json to_json(const JobPlanRequest& request, const JobPlanReport& report);
void print_table(const JobPlanRequest& request, const JobPlanReport& report, std::ostream& out);

/// Every tensor of the layers whose name holds `text`, its bytes as a formula with the numbers put
/// in. Throws InvalidInput("--explain") naming what there is if nothing does.
void explain_tensor(const Job& job, const std::string& text, std::ostream& out);

}  // namespace bagualu
