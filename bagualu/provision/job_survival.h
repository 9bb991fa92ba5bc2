#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/model/job.h"
#include "bagualu/model/routed_loads.h"
#include "bagualu/schedule/job_memory.h"

namespace bagualu {

/// Largest imbalance that any routing can cause on a rank of this job: every token of the
/// expert-parallel group uses as many experts of one rank as its top_k allows, over the balanced
/// rows; at most the capacity factor where tokens are dropped. 1 without experts.
/// Source: docs/design.md, section 6 (worst case EP * S * min(k, local experts)).
double worst_imbalance(const Job& job);

/// The loads without what no routing can cause: factors and spikes are at most worst_imbalance().
/// Recorded loads by layer are left as they are.
RoutedLoads possible_loads(RoutedLoads loads, const Job& job);

/// Largest factor, the same in every layer and micro-batch, at which this rank's peak is at most
/// the budget. 0: not even with no rows at all; the worst imbalance if every routing fits.
/// Units:   found to 1/1024.
double largest_survivable_factor(const Job& job, const JobMemory& memory, int64_t pp_rank,
                                 int64_t budget_bytes);

/// The job with one more action each: every module that its framework can recompute or offload
/// beside what it does already, and all layers recomputed. Named as "recompute moe_act".
std::vector<std::pair<std::string, Job>> job_actions(const Job& job);

/// What a recorded routing trace would have done to this job.
struct OomForecast {
  int64_t iterations = 0;           ///< of the trace
  int64_t iterations_over = 0;      ///< in which at least one rank exceeds the budget
  double per_1000 = 0;              ///< expected iterations over budget in 1,000
  double at_least_one_in_1000 = 0;  ///< probability, iterations taken as independent draws
  int64_t worst_iteration = -1;     ///< place in the trace
  int64_t worst_pp_rank = -1;
  int64_t worst_peak_bytes = 0;
};

/// Every iteration of the trace against every pipeline rank.
/// Shapes:  iterations: one load per iteration (of the hottest rank, say) by layer of the model
OomForecast oom_forecast(const Job& job, const JobMemory& memory, int64_t budget_bytes,
                         const std::vector<RoutedLoads>& iterations);

}  // namespace bagualu
