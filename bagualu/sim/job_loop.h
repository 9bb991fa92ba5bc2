// The loop of a job over its iterations, apart from what makes their times: replicas are whatever
// ReplicaModel the caller brings.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "bagualu/sim/job_sim.h"

namespace bagualu {

/// One replica's part of an iteration, or that of all, up to the exchange of gradients.
struct ReplicaOutcome {
  int64_t end_ns = 0;  ///< until a rank died, if one did
  bool died = false;
  bool repeat_step = false;  ///< its policy throws the step of all replicas away
  int64_t peak_bytes = 0;
  int64_t mitigated_ranks = 0;
  int64_t events = 0;
  double imbalance = 1;
};

/// Replicas of one job under one policy. Threads: one at a time.
class ReplicaModel {
 public:
  virtual ~ReplicaModel() = default;
  /// `draw`: which of the routing source's iterations. Depends on the arguments alone.
  virtual ReplicaOutcome run(int64_t draw, int64_t replica) = 0;
  /// The same rows once more, under the plan that steps are repeated with.
  virtual ReplicaOutcome repeat(int64_t draw, int64_t replica) = 0;
};

/// What the loop has to know of a job.
struct JobFigures {
  int64_t replicas = 1;
  int64_t after_pipeline_ns = 0;  ///< exchange, optimizer, gather, overhead
  int64_t tokens = 0;             ///< of an iteration, all devices
  double flops = 0;               ///< of an iteration, all devices: model FLOPs
  double peak_flops_per_s = 0;    ///< of all devices
};

/// The draw of an iteration's first, second, ... try.
int64_t draw_of(int64_t iteration, int64_t attempt);

/// Fills all of a SimRun but its policy.
/// Requires: options.iterations is what to run; make_model may be called from any thread.
SimRun run_job(const JobFigures& figures, const Interruptions& interruptions, uint64_t seed,
               const std::function<std::unique_ptr<ReplicaModel>()>& make_model,
               const SimOptions& options);

}  // namespace bagualu
