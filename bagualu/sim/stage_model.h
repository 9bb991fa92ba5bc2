// From a job to programs: graphs, costs and budgets of its pipeline ranks, the rank driver that
// decides, and the programs that come of it. The runtime has the same driver and policies.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bagualu/cost/system.h"
#include "bagualu/model/job.h"
#include "bagualu/model/routing_source.h"
#include "bagualu/provision/rank_program.h"
#include "bagualu/sim/engine.h"
#include "bagualu/sim/step_program.h"

namespace bagualu {

/// A policy with all that a simulation of it needs.
struct SimPolicy {
  std::string label;   ///< "adaptive", "full recompute, + per operator"
  std::string policy;  ///< of make_policy()
  PolicyOptions options;
  bool overlap = false;  ///< dual-batch slots
};

/// Where a cell's rows come from.
struct SimCell {
  int32_t microbatch = 0;
  int32_t moe_layer = 0;  ///< layers with experts, counted over the whole model
  bool operator==(const SimCell&) const = default;
};

/// The outcome of one rank's step.
struct RankOutcome {
  std::shared_ptr<const StepProgram> program;
  bool died = false;  ///< exceeded the budget; the program ends there
  int64_t peak_bytes = 0;
  int64_t mitigated_gates = 0;
  int64_t decisions = 0;
  int64_t exposed_ns = 0;  ///< by the decisions' own prediction
  bool repeat_step = false;
  int64_t serialised_segments = 0;  ///< parts of pairs of passes, for want of memory on some rank
};

/// One job under one policy on one machine.
/// Threads: one at a time per object; copies share nothing that changes.
class StageModel {
 public:
  /// budget_bytes: of a rank's device, static ones included; 0: no limit.
  /// Requires: job passed validate().
  /// Throws:   InvalidInput for what a simulation cannot do, named. (A budget below the floor is no
  ///           error here: short_by_bytes().)
  StageModel(const Job& job, const SystemSpec& system, const SimPolicy& policy,
             int64_t budget_bytes, int64_t host_budget_bytes);
  ~StageModel();

  int64_t members() const;  ///< of an expert group
  int64_t cells(int pp_rank) const;
  /// By cell of the pipeline rank.
  const std::vector<SimCell>& cell_places(int pp_rank) const;
  int64_t moe_layers() const;  ///< of the whole model, those of its multi-token prediction included
  RoutingGroup routing_group() const;  ///< what a source of rows has to know of an expert group
  int64_t balanced_rows() const;
  int64_t largest_rows() const;
  int64_t short_by_bytes(int pp_rank) const;  ///< of the floor, adaptive only; 0: it fits
  const SimLinks& links() const;

  /// Drives one rank alone with these rows by cell, gate by gate. Exact. Some ms.
  RankOutcome decide(int pp_rank, const int32_t* rows);

  /// Programs and outcomes of a whole expert group, as its ranks agree on them: a vote is passed if
  /// all members say yes. A member whose rows are nowhere above one of `levels` times the balanced
  /// ones shares the program that was decided at exactly that level (peaks rise with rows, so it
  /// fits wherever it is used) and votes as the level does; the others are driven with their own
  /// rows. Groups all of whose members are at levels are kept.
  /// levels empty: all are.
  /// Shapes: rows[cell * members() + member]; result by member
  std::vector<RankOutcome> group(int pp_rank, const int32_t* rows,
                                 const std::vector<double>& levels);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace bagualu
