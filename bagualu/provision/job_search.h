#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/cost/system.h"
#include "bagualu/model/job.h"
#include "bagualu/model/routed_loads.h"

namespace bagualu {

/// A residency policy as a framework's flags express it.
struct NamedRecompute {
  std::string name;  ///< "none", "moe_act+layernorm", "full"
  RecomputeSettings settings;
};

/// What a search may change of a job. The number of ranks, the sequence and the global batch stay.
struct SearchSpace {
  int64_t ranks_per_node = 8;  ///< tp and etp do not leave a node
  int64_t max_pp = 64;
  int64_t max_vpp = 8;
  int64_t max_cp = 1;
  std::vector<int64_t> micro_batch_sizes = {1, 2, 4};
  std::vector<PipelineKind> pipelines = {PipelineKind::k1F1B, PipelineKind::kInterleaved,
                                         PipelineKind::kZbH1, PipelineKind::kZbV,
                                         PipelineKind::kDualPipeV};
  std::vector<NamedRecompute> recompute;  ///< empty: default_recompute(model)
};

/// Nothing, the cheap modules of this model one after the other, everything.
std::vector<NamedRecompute> default_recompute(const ModelSpec& model);

/// One configuration that was looked at.
struct SearchPoint {
  JobLayout layout;
  PipelineKind pipeline = PipelineKind::k1F1B;
  int64_t micro_batch_size = 1;
  int64_t microbatches = 1;
  size_t recompute = 0;  ///< in SearchSpace::recompute
  int64_t iteration_ns = 0;
  double tokens_per_s = 0;
  double mfu_fraction = 0;
  int64_t peak_bytes = 0;        ///< of the heaviest rank at the asked loads
  double survivable_factor = 0;  ///< of the weakest rank
};

struct SearchResult {
  std::vector<NamedRecompute> recompute;
  int64_t configurations = 0;  ///< valid layouts, orders, batches and policies
  int64_t fitting = 0;
  std::vector<SearchPoint> best;    ///< fastest first
  std::vector<SearchPoint> pareto;  ///< fastest first; each survives more than every faster one
  /// Where nothing fits: the configuration with the smallest peak, and what it lacks.
  SearchPoint nearest;
  int64_t short_by_bytes = 0;
};

/// Job of a point: `base` with the point's layout, order, batch and recompute, stages anew.
Job job_of(const Job& base, const SearchResult& result, const SearchPoint& point);

/// Every configuration of the space under the budget at possible_loads() of `loads`.
/// Requires: base passed validate(); its microbatches and layout give the global batch.
/// Cost:     about 50 us per configuration, see BM_JobSearch.
SearchResult search_jobs(const Job& base, const SystemSpec& system, SearchSpace space,
                         const RoutedLoads& loads, int64_t budget_bytes, size_t keep = 10);

}  // namespace bagualu
