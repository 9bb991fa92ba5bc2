#include "bagualu/sim/replica_runner.h"

#include <algorithm>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

SimPolicy full_recompute_of(const SimPolicy& policy) {
  SimPolicy full;
  full.label = "full recompute";
  full.policy = "full-recompute";
  full.overlap = policy.overlap;
  return full;
}

}  // namespace

ReplicaRunner::Side::Side(const Scenario& scenario, const SimPolicy& policy)
    : model(scenario.job, scenario.system, policy, scenario.budget_bytes,
            scenario.host_budget_bytes),
      engine(model.links()) {}

ReplicaRunner::ReplicaRunner(const Scenario& scenario, const SimPolicy& policy,
                             const std::vector<double>& levels, const RoutingSource& source)
    : scenario_(scenario),
      policy_(policy),
      levels_(levels),
      source_(source),
      first_(scenario, policy),
      group_(first_.model.routing_group()),
      rank_rows_(static_cast<size_t>(scenario.job.layout.pp)) {}

ReplicaOutcome ReplicaRunner::run(int64_t draw, int64_t replica) {
  source_.rows(draw, replica, group_, &rows_);
  return run_on(first_);
}

ReplicaOutcome ReplicaRunner::repeat(int64_t draw, int64_t replica) {
  if (again_ == nullptr) again_ = std::make_unique<Side>(scenario_, full_recompute_of(policy_));
  source_.rows(draw, replica, group_, &rows_);
  return run_on(*again_);
}

SimReplicaResult ReplicaRunner::trace(int64_t draw, int64_t replica, std::vector<SimTrace>* traces,
                                      std::vector<std::shared_ptr<const StepProgram>>* programs) {
  source_.rows(draw, replica, group_, &rows_);
  const auto outcomes = decide(first_);
  programs->clear();
  for (const SimTrace& trace : *traces) {
    BGL_CHECK(trace.pp_rank >= 0 && trace.pp_rank < scenario_.job.layout.pp, trace.pp_rank);
    BGL_CHECK(trace.member >= 0 && trace.member < group_.ranks, trace.member);
    programs->push_back(
        outcomes[static_cast<size_t>(trace.pp_rank)][static_cast<size_t>(trace.member)].program);
  }
  return run_engine(first_, outcomes, traces);
}

int64_t ReplicaRunner::short_by_bytes() {
  int64_t most = 0;
  for (int rank = 0; rank < scenario_.job.layout.pp; ++rank) {
    most = std::max(most, first_.model.short_by_bytes(rank));
    const std::vector<int32_t> even(static_cast<size_t>(first_.model.cells(rank)),
                                    static_cast<int32_t>(group_.balanced_rows));
    const RankOutcome outcome = first_.model.decide(rank, even.data());
    if (outcome.died) most = std::max(most, outcome.peak_bytes - scenario_.budget_bytes);
  }
  return most;
}

ReplicaOutcome ReplicaRunner::run_on(Side& side) {
  if (side.has_run && side.rows == rows_) return side.outcome;
  const auto outcomes = decide(side);
  const SimReplicaResult result = run_engine(side, outcomes, nullptr);
  ReplicaOutcome outcome;
  outcome.end_ns = result.end_ns;
  outcome.died = result.died;
  outcome.events = result.events;
  outcome.imbalance = iteration_imbalance(group_, rows_);
  for (const SimMemberResult& member : result.by_member) {
    outcome.peak_bytes = std::max(outcome.peak_bytes, member.peak_bytes);
  }
  for (const auto& ranks : outcomes) {
    for (const RankOutcome& rank : ranks) {
      outcome.repeat_step = outcome.repeat_step || rank.repeat_step;
      outcome.mitigated_ranks += rank.mitigated_gates > 0 ? 1 : 0;
      // What the rank would have needed: the engine's peak ends where the program does.
      if (rank.died) outcome.peak_bytes = std::max(outcome.peak_bytes, rank.peak_bytes);
    }
  }
  std::swap(side.rows, rows_);
  side.outcome = outcome;
  side.has_run = true;
  return outcome;
}

std::vector<std::vector<RankOutcome>> ReplicaRunner::decide(Side& side) {
  const auto members = static_cast<size_t>(group_.ranks);
  std::vector<std::vector<RankOutcome>> outcomes;
  for (size_t rank = 0; rank < rank_rows_.size(); ++rank) {
    std::vector<int32_t>& rows = rank_rows_[rank];
    rows.clear();
    for (const SimCell& cell : side.model.cell_places(static_cast<int>(rank))) {
      const size_t place =
          static_cast<size_t>(cell.microbatch * group_.layers + cell.moe_layer) * members;
      rows.insert(rows.end(), rows_.begin() + static_cast<int64_t>(place),
                  rows_.begin() + static_cast<int64_t>(place + members));
    }
    outcomes.push_back(side.model.group(static_cast<int>(rank), rows.data(), levels_));
  }
  return outcomes;
}

SimReplicaResult ReplicaRunner::run_engine(Side& side,
                                           const std::vector<std::vector<RankOutcome>>& outcomes,
                                           std::vector<SimTrace>* traces) {
  std::vector<SimGroup> groups(outcomes.size());
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    for (const RankOutcome& outcome : outcomes[rank]) {
      BGL_CHECK(outcome.program->dies == outcome.died, rank);
      groups[rank].programs.push_back(outcome.program.get());
    }
    groups[rank].rows = rank_rows_[rank].data();
  }
  return side.engine.run(groups, traces);
}

double iteration_imbalance(const RoutingGroup& group, const std::vector<int32_t>& rows) {
  const auto ranks = static_cast<size_t>(group.ranks);
  const auto layers = static_cast<size_t>(group.layers);
  std::vector<int64_t> sums(layers * ranks, 0);
  for (size_t i = 0; i < rows.size(); ++i) sums[i % sums.size()] += rows[i];
  double most = 1;
  for (size_t layer = 0; layer < layers; ++layer) {
    const auto begin = sums.begin() + static_cast<int64_t>(layer * ranks);
    const auto end = begin + static_cast<int64_t>(ranks);
    int64_t sum = 0;
    for (auto at = begin; at != end; ++at) sum += *at;
    if (sum == 0) continue;
    const double mean = static_cast<double>(sum) / static_cast<double>(ranks);
    most = std::max(most, static_cast<double>(*std::max_element(begin, end)) / mean);
  }
  return most;
}

}  // namespace bagualu
