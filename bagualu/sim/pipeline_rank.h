#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bagualu/cost/system.h"
#include "bagualu/model/job.h"
#include "bagualu/provision/rank_program.h"
#include "bagualu/schedule/job_memory.h"
#include "bagualu/sim/program_recorder.h"
#include "bagualu/sim/stage_model.h"

namespace bagualu {

/// What all pipeline ranks of a simulated job share.
struct PipelinePlan {
  /// Throws: InvalidInput for what a simulation cannot do, named.
  PipelinePlan(const Job& job, const SystemSpec& system, const SimPolicy& policy,
               int64_t budget_bytes, int64_t host_budget_bytes);

  Job job;
  ModelSpec spec;  ///< job.model with the layers of its multi-token prediction behind its own
  SystemSpec system;
  SimPolicy policy;
  int64_t budget_bytes = 0, host_budget_bytes = 0;
  OverlapOrder order;
  SendPlan sends;
  LayerLoad balanced, worst_case;
  int64_t message_bytes = 0;
  std::vector<int32_t> moe_index;  ///< by layer: its place among those with experts, or -1
};

/// What the router sends to one member of an expert group.
struct MemberRows {
  const int32_t* rows = nullptr;  ///< of the first cell
  int64_t stride = 1;             ///< to the next cell's; 0: all cells have the same
  /// By cell: hottest member of the group over the mean. nullptr: this one is the hottest.
  const double* imbalance = nullptr;
};

/// One pipeline rank: graphs, prices and budgets of its stages, its driver and the recorder.
class PipelineRank {
 public:
  PipelineRank(const PipelinePlan& plan, const JobMemory& memory, int pp_rank);

  int32_t cells() const { return static_cast<int32_t>(places_.size()); }
  const std::vector<SimCell>& places() const { return places_; }
  int64_t short_by_bytes() const { return short_by_bytes_; }

  /// Drives members of the group side by side, gate by gate: a vote is passed if all of them who
  /// are still alive say yes. Exact. Some ms for each. One thread at a time runs.
  std::vector<RankOutcome> decide(const std::vector<MemberRows>& members);

 private:
  struct Stage {
    Graph graph;
    CostTable cost;
    ProvisionContext context;
    PolicyOptions options;
  };
  using Policies = std::vector<std::unique_ptr<Policy>>;  ///< by stage

  /// A member's own, for as long as it is driven. Policies that remember nothing are shared.
  struct Seat {
    Policies policies;  ///< if they remember
    std::vector<RankStage> stages;
    std::unique_ptr<ProgramRecorder> recorder;
  };

  void add_stage(int number, int64_t stages);
  void set_budgets();
  /// Gives `stages` policies that have seen nothing.
  Policies make_policies(std::vector<RankStage>& stages) const;
  bool fits_at(double factor);
  void fit_policies(double factor);
  std::unique_ptr<Seat> make_seat() const;
  RankOutcome drive(Seat& seat, const MemberRows& member,
                    const ProgramRecorder::Agree& agree) const;
  RankOutcome outcome_of(const RankRun& run) const;

  const PipelinePlan& plan_;
  int64_t static_bytes_ = 0;
  int64_t short_by_bytes_ = 0;
  RankProgram program_;
  RankOptions options_;
  std::vector<std::unique_ptr<Stage>> stages_;
  std::vector<RankStage> list_;
  Policies policies_;  ///< of list_
  std::vector<SimCell> places_;
  std::vector<std::unique_ptr<Seat>> seats_;
};

}  // namespace bagualu
