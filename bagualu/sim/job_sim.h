// A job over many iterations: every replica of every iteration, the gradient exchange, memory that
// runs out, restarts, checkpoints, failures.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/sim/scenario.h"

namespace bagualu {

/// One iteration, or one try of it that died.
struct SimIteration {
  int64_t iteration = 0;
  double imbalance = 1;      ///< over layers, hottest rank over mean, all micro-batches
  int64_t iteration_ns = 0;  ///< exchange of gradients, optimizer, overhead included
  int64_t pipeline_ns = 0;   ///< of the slowest replica, a repetition of the step included
  int64_t peak_bytes = 0;    ///< of the heaviest rank
  int64_t mitigated_ranks = 0;
  bool repeated = false;  ///< the policy threw the step away and ran it once more
  bool died = false;      ///< of memory; then times and bytes are those until then
};

/// Of one policy. Simulated, all of it.
struct SimRun {
  SimPolicy policy;
  int64_t iterations = 0;  ///< that count: repeated ones once
  int64_t tokens = 0;
  double seconds = 0;       ///< wall time of the job, restarts and lost iterations included
  double seconds_calm = 0;  ///< of the iterations that count alone: no interruption
  double tokens_per_s = 0;  ///< over `seconds`
  double tokens_per_s_calm = 0;
  double mfu_fraction = 0;       ///< over `seconds`
  double mfu_calm_fraction = 0;  ///< over iterations alone
  double best_mfu_fraction = 0;  ///< of an iteration
  double flops_per_s = 0;        ///< model FLOPs, all devices, over `seconds`
  int64_t ooms = 0;
  int64_t failures = 0;
  int64_t lost_iterations = 0;  ///< that had been completed and were done again
  int64_t repeated_steps = 0;
  int64_t mitigated_iterations = 0;
  double restart_s = 0, lost_s = 0, checkpoint_s = 0;  ///< with seconds_calm they are `seconds`
  int64_t peak_bytes = 0;
  /// The policy cannot run at all, and was not: missing bytes, for `adaptive` of its floor, for
  /// others at least, where even the balanced router kills it.
  int64_t short_by_bytes = 0;
  int64_t unable_iteration = -1;     ///< died there SimOptions::most_deaths times; the run ends
  int64_t events = 0;                ///< operators and transfers of all ranks
  std::vector<SimIteration> series;  ///< at most `series_limit` of the options, evenly spread, and
                                     ///< every one that died
};

struct SimOptions {
  int64_t iterations = 0;  ///< 0: the scenario's
  int threads = 1;         ///< results do not depend on it
  /// Loads whose decisions ranks share (StageModel::group()). Empty: every rank decides alone.
  std::vector<double> levels = {1.1, 1.2, 1.35, 1.5};
  int64_t series_limit = 2000;
  /// Of one iteration, before the policy counts as unable to train this job. Not fewer: a policy
  /// that every spike of the paper's routing kills (2.9 % of iterations) dies three times in a row
  /// by chance in one of five jobs of 10,000 iterations.
  int64_t most_deaths = 5;
  /// After every iteration; false: stop.
  std::function<bool(int64_t done, int64_t total)> progress;
};

/// What happens when a rank runs out of memory: the iteration ends there, the job restarts
/// (Interruptions::restart_s), goes back to its last checkpoint and repeats what it had done since,
/// in the same time. The iteration that died is then tried again with routing of its own (a fresh
/// draw of the scenario's source, the same for all policies): ASSUMED, since with the same rows it
/// would die for ever, and jobs in practice go on, by luck or by skipping the data.
/// Failures strike while iterations and checkpoints run, not while the job restarts.
/// Throws: InvalidInput for what a simulation cannot do.
/// Cost:   linear in iterations and ranks; memory does not grow with iterations.
SimRun simulate_job(const Scenario& scenario, const SimPolicy& policy, const SimOptions& options);

/// One replica's iteration in detail. Owns: the programs that the events' names lie in.
struct SimTracedReplica {
  SimReplicaResult result;
  std::vector<SimTrace> traces;                              ///< as asked for
  std::vector<std::shared_ptr<const StepProgram>> programs;  ///< by trace
};

class ReplicaRunner;

/// Looks into iterations of a job, replica by replica.
/// Threads: one at a time.
class ReplicaTracer {
 public:
  /// Requires: scenario outlives it. Throws: as simulate_job().
  ReplicaTracer(const Scenario& scenario, const SimPolicy& policy, const SimOptions& options);
  ~ReplicaTracer();

  /// The chosen ranks of a replica in an iteration, as simulate_job() would have run it first.
  /// Throws: InvalidInput for a replica or rank that is not there.
  SimTracedReplica trace(int64_t iteration, int64_t replica, std::vector<SimTrace> traces);

  const StageModel& model() const;

 private:
  const Scenario& scenario_;
  std::unique_ptr<RoutingSource> source_;
  std::unique_ptr<ReplicaRunner> runner_;
};

Json to_json(const SimRun& run);

}  // namespace bagualu
