// A job over many iterations: every replica of every iteration, the gradient exchange, memory that
// runs out, restarts, checkpoints, failures.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/sim/scenario.h"

namespace bagualu {

struct SimIteration {
  int64_t iteration = 0;
  double imbalance = 1;      ///< over layers, hottest rank over mean, all micro-batches
  int64_t iteration_ns = 0;  ///< exchange of gradients, optimizer, overhead included
  int64_t pipeline_ns = 0;   ///< of the slowest replica
  int64_t peak_bytes = 0;    ///< of the heaviest rank
  int64_t mitigated_ranks = 0;
  bool died = false;  ///< of memory; then times and bytes are those until then
};

/// Of one policy. Simulated, all of it.
struct SimRun {
  SimPolicy policy;
  int64_t iterations = 0;  ///< that count: repeated ones once
  int64_t tokens = 0;
  double seconds = 0;          ///< wall time of the job, restarts and lost iterations included
  double seconds_calm = 0;     ///< mean iteration times `iterations`: no interruption
  double tokens_per_s = 0;
  double mfu_fraction = 0;       ///< over `seconds`
  double mfu_calm_fraction = 0;  ///< over iterations alone
  double best_mfu_fraction = 0;  ///< of an iteration
  double flops_per_s = 0;        ///< model FLOPs, all devices, over `seconds`
  int64_t ooms = 0;
  int64_t failures = 0;
  int64_t lost_iterations = 0;
  double restart_s = 0, lost_s = 0, checkpoint_s = 0;
  int64_t peak_bytes = 0;
  int64_t short_by_bytes = 0;  ///< the policy cannot run at all: missing bytes
  int64_t events = 0;          ///< operators and transfers
  std::vector<SimIteration> series;  ///< at most `series_limit` of the options, evenly spread, and
                                     ///< every one that died
};

struct SimOptions {
  int64_t iterations = 0;  ///< 0: the scenario's
  int threads = 1;         ///< results do not depend on it
  /// Loads whose decisions ranks share (StageModel::group()). Empty: every rank decides alone.
  std::vector<double> levels = {1.1, 1.2, 1.35, 1.5};
  int64_t series_limit = 2000;
  /// After every iteration; false: stop.
  std::function<bool(int64_t done, int64_t total)> progress;
};

/// Throws: InvalidInput for what a simulation cannot do.
/// Cost:   linear in iterations and ranks; memory does not grow with iterations.
SimRun simulate_job(const Scenario& scenario, const SimPolicy& policy, const SimOptions& options);

Json to_json(const SimRun& run);

}  // namespace bagualu
