#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bagualu/model/routing_source.h"
#include "bagualu/sim/engine.h"
#include "bagualu/sim/job_loop.h"
#include "bagualu/sim/scenario.h"
#include "bagualu/sim/stage_model.h"

namespace bagualu {

/// Replicas of a scenario: its routing through the stage model and the engine. The same rows as
/// those of the call before have the same outcome and are not run again (balanced routing: one run
/// in all), which is exact.
class ReplicaRunner final : public ReplicaModel {
 public:
  /// Requires: scenario and source outlive the runner.
  /// Throws:   InvalidInput for what a simulation cannot do.
  ReplicaRunner(const Scenario& scenario, const SimPolicy& policy,
                const std::vector<double>& levels, const RoutingSource& source);

  ReplicaOutcome run(int64_t draw, int64_t replica) override;
  /// With full recompute.
  ReplicaOutcome repeat(int64_t draw, int64_t replica) override;

  /// run(), with what happens on the chosen ranks, and their programs by trace.
  SimReplicaResult trace(int64_t draw, int64_t replica, std::vector<SimTrace>* traces,
                         std::vector<std::shared_ptr<const StepProgram>>* programs);

  /// Of the pipeline rank that misses most, to survive every routing (adaptive) or the balanced one
  /// (others: at least that much, they end where they die); 0: all fit.
  int64_t short_by_bytes();
  const RoutingGroup& group() const { return group_; }
  const StageModel& model() const { return first_.model; }

 private:
  /// Drives ranks and runs them, under one policy.
  struct Side {
    Side(const Scenario& scenario, const SimPolicy& policy);
    StageModel model;
    SimEngine engine;
    std::vector<int32_t> rows;  ///< of the last run
    ReplicaOutcome outcome;     ///< of the last run
    bool has_run = false;
  };

  ReplicaOutcome run_on(Side& side);
  /// Programs of all ranks at rows_, by pipeline rank and member.
  std::vector<std::vector<RankOutcome>> decide(Side& side);
  SimReplicaResult run_engine(Side& side, const std::vector<std::vector<RankOutcome>>& outcomes,
                              std::vector<SimTrace>* traces);

  const Scenario& scenario_;
  const SimPolicy policy_;
  const std::vector<double> levels_;
  const RoutingSource& source_;
  Side first_;
  std::unique_ptr<Side> again_;  ///< made when a step is repeated for the first time
  RoutingGroup group_;
  std::vector<int32_t> rows_;  ///< of the replica at hand, as the source gives them
  std::vector<std::vector<int32_t>> rank_rows_;  ///< by pipeline rank: [cell][member]
};

/// Over layers the hottest rank over the mean, rows added up over micro-batches. 1 without rows.
/// Shapes: rows as RoutingSource::rows() gives them
double iteration_imbalance(const RoutingGroup& group, const std::vector<int32_t>& rows);

}  // namespace bagualu
