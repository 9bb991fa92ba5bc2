#include "bagualu/sim/job_sim.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/schedule/job_time.h"
#include "bagualu/sim/job_loop.h"
#include "bagualu/sim/replica_runner.h"

namespace bagualu {
namespace {

/// 16 devices: two pipeline ranks, expert groups of four, two replicas; three layers with experts.
Scenario small_scenario() {
  Scenario scenario;
  scenario.name = "small";
  Job& job = scenario.job;
  job.model = model_from_file(BAGUALU_SOURCE_DIR "/configs/models/tiny.json");
  job.layout = parse_layout("pp=2,ep=4,dp=8", "test", "layout");
  job.stages = default_stages(job.model, 2, 1);
  job.microbatches = 4;
  job.seq = 512;
  job.optimizer.distributed = true;
  validate(job, "test");
  scenario.system = system_from_file(BAGUALU_SOURCE_DIR "/configs/systems/h100.json");
  scenario.routing.kind = "paper";
  scenario.routing.calm_fraction = 0.9;
  scenario.iterations = 60;
  scenario.seed = 5;
  scenario.routing.seed = 5;
  scenario.interruptions.restart_s = 10;
  scenario.interruptions.checkpoint_interval = 16;
  scenario.interruptions.checkpoint_s = 1;
  return scenario;
}

SimPolicy policy_of(const std::string& name) {
  SimPolicy policy;
  policy.label = name;
  policy.policy = name;
  return policy;
}

/// Least budget under which `adaptive` survives every routing, on every pipeline rank.
int64_t floor_bytes(const Scenario& scenario) {
  const StageModel model(scenario.job, scenario.system, policy_of("adaptive"), 1, 0);
  int64_t most = 0;
  for (int rank = 0; rank < 2; ++rank) most = std::max(most, model.short_by_bytes(rank));
  return 1 + most;
}

/// Most that any rank holds with everything saved and the router even.
int64_t calm_bytes(const Scenario& scenario) {
  StageModel model(scenario.job, scenario.system, policy_of("save-all"), 0, 0);
  int64_t most = 0;
  for (int rank = 0; rank < 2; ++rank) {
    const std::vector<int32_t> rows(static_cast<size_t>(model.cells(rank)),
                                    static_cast<int32_t>(model.balanced_rows()));
    most = std::max(most, model.decide(rank, rows.data()).peak_bytes);
  }
  return most;
}

int64_t between(int64_t low, int64_t high, double part) {
  return low + static_cast<int64_t>(part * static_cast<double>(high - low));
}

/// Calls visit(outcome) for every rank of every replica, each driven with its own rows.
template <class Visit>
void drive_all(const Scenario& scenario, StageModel& model, int64_t draw, const Visit& visit) {
  const RoutingGroup group = model.routing_group();
  const auto source = routing_of(scenario);
  std::vector<int32_t> rows;
  for (int64_t replica = 0; replica < group.replicas; ++replica) {
    source->rows(draw, replica, group, &rows);
    for (int rank = 0; rank < scenario.job.layout.pp; ++rank) {
      for (int64_t member = 0; member < group.ranks; ++member) {
        std::vector<int32_t> mine;
        for (const SimCell& cell : model.cell_places(rank)) {
          const int64_t place = cell.microbatch * group.layers + cell.moe_layer;
          mine.push_back(rows[static_cast<size_t>(place * group.ranks + member)]);
        }
        visit(model.decide(rank, mine.data()));
      }
    }
  }
}

TEST(SimulateJob, StaticDiesInTheIterationsInWhichARanksExactPeakIsOverTheBudget) {
  Scenario scenario = small_scenario();
  scenario.budget_bytes = between(floor_bytes(scenario), calm_bytes(scenario), 0.8);
  SimOptions options;
  options.most_deaths = 50;
  StageModel model(scenario.job, scenario.system, policy_of("static"), scenario.budget_bytes, 0);
  int64_t deaths = 0;
  for (int64_t i = 0; i < scenario.iterations; ++i) {
    for (int64_t attempt = 0;; ++attempt) {
      bool over = false;
      drive_all(scenario, model, draw_of(i, attempt), [&](const RankOutcome& rank) {
        EXPECT_EQ(rank.died, rank.peak_bytes > scenario.budget_bytes);
        over = over || rank.peak_bytes > scenario.budget_bytes;
      });
      if (!over) break;
      ++deaths;
    }
  }
  EXPECT_GT(deaths, 1);
  EXPECT_LT(deaths, scenario.iterations / 2);
  const SimRun run = simulate_job(scenario, policy_of("static"), options);
  EXPECT_EQ(run.ooms, deaths);
  EXPECT_EQ(run.iterations, scenario.iterations);
  EXPECT_DOUBLE_EQ(run.restart_s, 10.0 * static_cast<double>(deaths));
  EXPECT_DOUBLE_EQ(run.checkpoint_s, 3);  // behind 16, 32 and 48
  EXPECT_NEAR(run.seconds, run.seconds_calm + run.lost_s + run.restart_s + run.checkpoint_s, 1e-9);
  int64_t kept = 0;
  for (const SimIteration& one : run.series) {
    kept += one.died ? 1 : 0;
    EXPECT_EQ(one.died, one.peak_bytes > scenario.budget_bytes);
  }
  EXPECT_EQ(kept, deaths);
}

TEST(SimulateJob, AdaptiveNeverDiesFromTheFloorUp) {
  Scenario scenario = small_scenario();
  scenario.iterations = 2'000;
  const int64_t floor = floor_bytes(scenario);
  scenario.budget_bytes = floor;
  SimRun run = simulate_job(scenario, policy_of("adaptive"), {});
  EXPECT_EQ(run.ooms, 0);
  EXPECT_EQ(run.iterations, 2'000);
  EXPECT_LE(run.peak_bytes, floor);

  scenario.budget_bytes = between(floor, calm_bytes(scenario), 0.8);
  run = simulate_job(scenario, policy_of("adaptive"), {});
  EXPECT_EQ(run.ooms, 0);
  EXPECT_LE(run.peak_bytes, scenario.budget_bytes);
  // The routing does spike, and there is something to give up.
  EXPECT_GT(run.mitigated_iterations, 50);
}

TEST(SimulateJob, BelowTheFloorMissingBytesAreSaidAndNothingIsRun) {
  Scenario scenario = small_scenario();
  scenario.budget_bytes = floor_bytes(scenario) - 7;
  const SimRun run = simulate_job(scenario, policy_of("adaptive"), {});
  EXPECT_EQ(run.short_by_bytes, 7);
  EXPECT_EQ(run.iterations, 0);
  EXPECT_EQ(run.events, 0);
}

TEST(SimulateJob, APolicyThatTheBalancedRouterKillsIsNotRun) {
  Scenario scenario = small_scenario();
  scenario.budget_bytes = calm_bytes(scenario) - 1;
  const SimRun run = simulate_job(scenario, policy_of("save-all"), {});
  EXPECT_GE(run.short_by_bytes, 1);
  EXPECT_EQ(run.iterations, 0);
  scenario.budget_bytes += 1;
  scenario.routing.kind = "balanced";
  EXPECT_EQ(simulate_job(scenario, policy_of("save-all"), {}).short_by_bytes, 0);
}

TEST(SimulateJob, ThreadsDoNotChangeAByteAndSeedsDo) {
  Scenario scenario = small_scenario();
  scenario.interruptions.failures_per_day = 43'200;  // every 2 s of a job of about 5
  scenario.budget_bytes = between(floor_bytes(scenario), calm_bytes(scenario), 0.8);
  for (const char* name : {"static", "adaptive", "retry"}) {
    // "retry" saves everything, which does not fit.
    if (std::string(name) == "retry") scenario.budget_bytes = 0;
    SimOptions options;
    options.most_deaths = 50;
    const std::string one = to_json(simulate_job(scenario, policy_of(name), options)).dump();
    for (const int threads : {1, 2, 5}) {
      options.threads = threads;
      EXPECT_EQ(to_json(simulate_job(scenario, policy_of(name), options)).dump(), one)
          << name << " " << threads;
    }
    Scenario other = scenario;
    other.routing.seed = 6;
    EXPECT_NE(to_json(simulate_job(other, policy_of(name), options)).dump(), one) << name;
  }
}

TEST(SimulateJob, PlansThatDoNotLookAtLoadsAreTheSameWithoutSharedDecisions) {
  Scenario scenario = small_scenario();
  scenario.budget_bytes = between(floor_bytes(scenario), calm_bytes(scenario), 0.8);
  for (const char* name : {"static", "full-recompute"}) {
    SimOptions options;
    options.most_deaths = 50;
    const SimRun shared = simulate_job(scenario, policy_of(name), options);
    options.levels.clear();
    const SimRun alone = simulate_job(scenario, policy_of(name), options);
    ASSERT_EQ(shared.series.size(), alone.series.size());
    for (size_t i = 0; i < shared.series.size(); ++i) {
      EXPECT_EQ(shared.series[i].iteration_ns, alone.series[i].iteration_ns) << name << " " << i;
      EXPECT_EQ(shared.series[i].peak_bytes, alone.series[i].peak_bytes) << name << " " << i;
    }
    EXPECT_EQ(shared.seconds, alone.seconds);
    EXPECT_EQ(shared.events, alone.events);
  }
}

TEST(SimulateJob, BalancedIterationsAreAllTheSame) {
  Scenario scenario = small_scenario();
  scenario.routing.kind = "balanced";
  const SimRun run = simulate_job(scenario, policy_of("save-all"), {});
  const JobTime time = job_time(scenario.job, scenario.system, {});
  ASSERT_EQ(run.series.size(), 60u);
  for (const SimIteration& one : run.series) {
    EXPECT_EQ(one.imbalance, 1);
    EXPECT_EQ(one.iteration_ns, run.series[0].iteration_ns);
    EXPECT_EQ(
        one.iteration_ns - one.pipeline_ns,
        time.gradient_reduce_ns + time.parameter_gather_ns + time.optimizer_ns + time.overhead_ns);
  }
  // 512 tokens, 4 micro-batches, 8 data-parallel ranks.
  EXPECT_EQ(run.tokens, 60 * 512 * 4 * 8);
  EXPECT_DOUBLE_EQ(run.mfu_calm_fraction, run.best_mfu_fraction);
  const double seconds = static_cast<double>(run.series[0].iteration_ns) / 1e9;
  EXPECT_NEAR(run.best_mfu_fraction, time.model_flops / seconds / (16 * 989e12), 1e-12);
}

TEST(SimulateJob, WorkGrowsWithIterationsAndReplicas) {
  Scenario scenario = small_scenario();
  const int64_t events = simulate_job(scenario, policy_of("save-all"), {}).events;
  EXPECT_GT(events, 0);
  scenario.iterations *= 3;
  EXPECT_EQ(simulate_job(scenario, policy_of("save-all"), {}).events, 3 * events);
  scenario.job.layout.world_size *= 2;
  validate(scenario.job, "test");
  EXPECT_EQ(simulate_job(scenario, policy_of("save-all"), {}).events, 6 * events);
}

TEST(SimulateJob, RetryRunsAStepAgainWithFullRecompute) {
  Scenario scenario = small_scenario();
  scenario.job.layout.world_size = 8;  // one replica
  const SimRun run = simulate_job(scenario, policy_of("retry"), {});
  const SimRun full = simulate_job(scenario, policy_of("full-recompute"), {});
  StageModel model(scenario.job, scenario.system, policy_of("retry"), 0, 0);
  ReplicaTracer tracer(scenario, policy_of("retry"), {});
  const int64_t after = run.series[0].iteration_ns - run.series[0].pipeline_ns;
  int64_t repeated = 0;
  ASSERT_EQ(run.series.size(), 60u);
  for (const SimIteration& one : run.series) {
    bool overflowed = false;
    drive_all(scenario, model, one.iteration,
              [&](const RankOutcome& rank) { overflowed = overflowed || rank.repeat_step; });
    EXPECT_EQ(one.repeated, overflowed) << one.iteration;
    repeated += overflowed ? 1 : 0;
    if (!overflowed) continue;
    const SimTracedReplica first = tracer.trace(one.iteration, 0, {});
    const SimIteration& second = full.series[static_cast<size_t>(one.iteration)];
    EXPECT_EQ(one.pipeline_ns, first.result.end_ns + second.pipeline_ns);
    EXPECT_EQ(one.iteration_ns, one.pipeline_ns + after);
  }
  EXPECT_EQ(run.repeated_steps, repeated);
  EXPECT_GT(repeated, 0);
  EXPECT_LT(repeated, 60);
}

TEST(TraceIteration, IsTheSlowestReplicaOfTheRun) {
  const Scenario scenario = small_scenario();
  const SimRun run = simulate_job(scenario, policy_of("save-all"), {});
  int64_t slowest = 0;
  ReplicaTracer tracer(scenario, policy_of("save-all"), {});
  for (int64_t replica = 0; replica < 2; ++replica) {
    const SimTracedReplica traced = tracer.trace(17, replica, {{0, 1, {}}, {1, 3, {}}});
    slowest = std::max(slowest, traced.result.end_ns);
    ASSERT_EQ(traced.traces.size(), 2u);
    ASSERT_EQ(traced.programs.size(), 2u);
    for (size_t t = 0; t < 2; ++t) {
      EXPECT_FALSE(traced.traces[t].events.empty());
      for (const SimTraceEvent& event : traced.traces[t].events) {
        EXPECT_LE(event.end_ns, traced.result.end_ns);
        EXPECT_LT(static_cast<size_t>(event.name), traced.programs[t]->names.size());
      }
    }
  }
  EXPECT_EQ(slowest, run.series[17].pipeline_ns);
}

TEST(SimulateJob, RefusesOptionsThatMeanNothing) {
  const Scenario scenario = small_scenario();
  const auto refused = [&](const SimOptions& options) {
    EXPECT_THROW(simulate_job(scenario, policy_of("save-all"), options), InvalidInput);
  };
  SimOptions options;
  options.iterations = -1;
  refused(options);
  options = {};
  options.threads = 0;
  refused(options);
  options = {};
  options.most_deaths = 0;
  refused(options);
  ReplicaTracer tracer(scenario, policy_of("save-all"), {});
  EXPECT_THROW(tracer.trace(0, 2, {}), InvalidInput);
  EXPECT_THROW(tracer.trace(0, 0, {{2, 0, {}}}), InvalidInput);
}

TEST(IterationImbalance, IsTheHottestRankOverTheMeanOfTheHottestLayer) {
  RoutingGroup group;
  group.layers = 2;
  group.microbatches = 2;
  group.ranks = 2;
  // Layer 0: rank 0 gets 6 + 4 of 16; layer 1: rank 1 gets 5 + 7 of 16, over the mean 8: 1.5.
  EXPECT_DOUBLE_EQ(iteration_imbalance(group, {6, 2, 3, 5, 4, 4, 1, 7}), 1.5);
  EXPECT_DOUBLE_EQ(iteration_imbalance(group, {4, 4, 4, 4, 4, 4, 4, 4}), 1);
  EXPECT_DOUBLE_EQ(iteration_imbalance(group, {0, 0, 0, 0, 0, 0, 0, 0}), 1);
}

}  // namespace
}  // namespace bagualu
