#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/cost/job_cost.h"
#include "bagualu/cost/system.h"
#include "bagualu/model/job.h"
#include "bagualu/model/routed_loads.h"
#include "bagualu/schedule/pipeline_time.h"

namespace bagualu {

/// One micro-batch through one virtual stage, waits for other ranks and for the host included.
struct StageTime {
  int64_t forward_ns = 0;
  int64_t backward_ns = 0;  ///< both gradients, and what is recomputed before them
  int64_t input_gradient_ns = 0;
  int64_t weight_gradient_ns = 0;
  int64_t recompute_ns = 0;              ///< inside backward_ns
  int64_t exposed_communication_ns = 0;  ///< inside the two passes
  int64_t exposed_offload_ns = 0;        ///< inside the two passes
  int64_t offload_bytes = 0;
};

/// Predicted time of one training step.
/// Model FLOPs count products alone, forward and twice that backward: 6 per weight that a token
/// meets, and 6 * (query + value width) per layer for each key that causality and window let a
/// token see (half the sequence on average). Recomputed work, masked scores, embeddings and norms
/// do not count.
struct JobTime {
  int64_t iteration_ns = 0;
  double mfu_fraction = 0;  ///< model FLOPs over iteration, devices and their peak
  double tokens_per_s = 0;  ///< of the whole job
  double model_flops = 0;   ///< of the whole step on all devices
  double model_flops_per_s_per_device = 0;

  int64_t pipeline_ns = 0;  ///< from the first forward to the last backward
  // Of the pipeline rank with the longest passes; together with its compute they are pipeline_ns.
  int64_t bubble_ns = 0;
  int64_t exposed_communication_ns = 0;
  int64_t recompute_ns = 0;
  int64_t exposed_offload_ns = 0;
  // After and before the pipeline; what overlap hides is left out.
  int64_t gradient_reduce_ns = 0;
  int64_t parameter_gather_ns = 0;
  int64_t optimizer_ns = 0;
  int64_t overhead_ns = 0;
  std::vector<StageTime> stages;  ///< by virtual stage, at the load without spikes
};

/// Of one device, at the precision that the job's GEMMs run in: what MFU is a fraction of.
double peak_flops_per_s(const Job& job, const SystemSpec& system);

/// Requires: job passed validate(); loads.by_layer is empty or has one entry per layer.
/// Cost:    about 20 us for a job without spikes.
/// Source:  docs/design.md, "Cost of jobs".
JobTime job_time(const Job& job, const SystemSpec& system, const RoutedLoads& loads);

}  // namespace bagualu
