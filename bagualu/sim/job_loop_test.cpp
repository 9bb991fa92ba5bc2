#include "bagualu/sim/job_loop.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <vector>

namespace bagualu {
namespace {

constexpr int64_t kS = 1'000'000'000;

/// A model of functions; the default: every replica takes 10 s, and replica r another r seconds.
class FakeModel final : public ReplicaModel {
 public:
  using Run = std::function<ReplicaOutcome(int64_t draw, int64_t replica)>;
  FakeModel(Run run, Run repeat) : run_(std::move(run)), repeat_(std::move(repeat)) {}
  ReplicaOutcome run(int64_t draw, int64_t replica) override { return run_(draw, replica); }
  ReplicaOutcome repeat(int64_t draw, int64_t replica) override { return repeat_(draw, replica); }

 private:
  Run run_;
  Run repeat_;
};

ReplicaOutcome seconds(int64_t s) {
  ReplicaOutcome outcome;
  outcome.end_ns = s * kS;
  outcome.peak_bytes = 1'000 + s;
  outcome.events = 100;
  return outcome;
}

struct Rig {
  JobFigures figures;
  Interruptions interruptions;
  SimOptions options;
  uint64_t seed = 1;
  FakeModel::Run run = [](int64_t, int64_t replica) { return seconds(10 + replica); };
  FakeModel::Run repeat = [](int64_t, int64_t) -> ReplicaOutcome {
    ADD_FAILURE() << "nothing asked for a repetition";
    return {};
  };

  Rig() {
    figures.replicas = 3;
    figures.after_pipeline_ns = 2 * kS;
    figures.tokens = 1'000;
    figures.flops = 4e12;
    figures.peak_flops_per_s = 1e12;
    interruptions.restart_s = 100;
    interruptions.checkpoint_interval = 4;
    interruptions.checkpoint_s = 5;
    options.iterations = 10;
  }

  SimRun simulate() const {
    return run_job(
        figures, interruptions, seed, [this] { return std::make_unique<FakeModel>(run, repeat); },
        options);
  }
};

TEST(JobLoop, AnIterationIsTheSlowestReplicaAndWhatFollows) {
  const SimRun run = Rig().simulate();
  // Slowest of 10, 11, 12 s and 2 s after the pipeline: 14 s; checkpoints behind 4 and 8.
  EXPECT_EQ(run.iterations, 10);
  EXPECT_DOUBLE_EQ(run.seconds_calm, 140);
  EXPECT_DOUBLE_EQ(run.seconds, 150);
  EXPECT_EQ(run.tokens, 10'000);
  EXPECT_DOUBLE_EQ(run.tokens_per_s, 10'000.0 / 150);
  EXPECT_DOUBLE_EQ(run.tokens_per_s_calm, 10'000.0 / 140);
  EXPECT_DOUBLE_EQ(run.flops_per_s, 4e13 / 150);
  EXPECT_DOUBLE_EQ(run.mfu_fraction, 40.0 / 150);
  EXPECT_DOUBLE_EQ(run.mfu_calm_fraction, 40.0 / 140);
  EXPECT_DOUBLE_EQ(run.best_mfu_fraction, 4.0 / 14);
  EXPECT_EQ(run.peak_bytes, 1'012);
  EXPECT_EQ(run.ooms, 0);
  EXPECT_EQ(run.unable_iteration, -1);
  ASSERT_EQ(run.series.size(), 10u);
  EXPECT_EQ(run.series[3].iteration, 3);
  EXPECT_EQ(run.series[3].pipeline_ns, 12 * kS);
  EXPECT_EQ(run.series[3].iteration_ns, 14 * kS);
}

TEST(JobLoop, EventsGrowWithIterationsAndReplicas) {
  Rig rig;
  EXPECT_EQ(rig.simulate().events, 10 * 3 * 100);
  rig.options.iterations = 20;
  EXPECT_EQ(rig.simulate().events, 20 * 3 * 100);
  rig.figures.replicas = 6;
  EXPECT_EQ(rig.simulate().events, 20 * 6 * 100);
}

TEST(JobLoop, ADeathEndsTheIterationAndTheNextTryHasRoutingOfItsOwn) {
  Rig rig;
  std::vector<int64_t> draws;
  rig.run = [&](int64_t draw, int64_t replica) {
    if (replica == 0) draws.push_back(draw);
    ReplicaOutcome outcome = seconds(10);
    outcome.died = draw == 5 && replica > 0;
    if (outcome.died) outcome.end_ns = (replica == 1 ? 7 : 3) * kS;
    return outcome;
  };
  const SimRun run = rig.simulate();
  // Iterations of 12 s. The sixth dies with the first rank that does, after 3 s, and the fifth is
  // done again: 120 + 2 * 5 + 3 + 100 + 12.
  EXPECT_DOUBLE_EQ(run.seconds, 245);
  EXPECT_DOUBLE_EQ(run.seconds_calm, 120);
  EXPECT_DOUBLE_EQ(run.lost_s, 15);
  EXPECT_DOUBLE_EQ(run.restart_s, 100);
  EXPECT_DOUBLE_EQ(run.checkpoint_s, 10);
  EXPECT_EQ(run.ooms, 1);
  EXPECT_EQ(run.lost_iterations, 1);
  EXPECT_EQ(run.iterations, 10);
  EXPECT_EQ(draws, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, draw_of(5, 1), 6, 7, 8, 9}));
  ASSERT_EQ(run.series.size(), 11u);
  EXPECT_TRUE(run.series[5].died);
  EXPECT_EQ(run.series[5].iteration_ns, 3 * kS);
  EXPECT_EQ(run.series[6].iteration, 5);
  EXPECT_FALSE(run.series[6].died);
}

TEST(JobLoop, APolicyThatDiesTooOftenIsReportedAsUnable) {
  Rig rig;
  rig.options.most_deaths = 3;
  rig.run = [](int64_t draw, int64_t) {
    ReplicaOutcome outcome = seconds(10);
    outcome.died = draw % 1'000'003 == 2;
    return outcome;
  };
  const SimRun run = rig.simulate();
  EXPECT_EQ(run.unable_iteration, 2);
  EXPECT_EQ(run.ooms, 3);
  EXPECT_EQ(run.iterations, 2);
  // 2 * 12 + 3 * (10 + 100 + 24).
  EXPECT_DOUBLE_EQ(run.seconds, 426);
}

TEST(JobLoop, DyingInTheFirstIterationLeavesRatesAtZero) {
  Rig rig;
  rig.run = [](int64_t, int64_t) {
    ReplicaOutcome outcome = seconds(1);
    outcome.died = true;
    return outcome;
  };
  const SimRun run = rig.simulate();
  EXPECT_EQ(run.unable_iteration, 0);
  EXPECT_EQ(run.ooms, rig.options.most_deaths);
  EXPECT_EQ(run.tokens_per_s, 0);
  EXPECT_EQ(run.mfu_fraction, 0);
}

TEST(JobLoop, AStepThatOneReplicaThrowsAwayIsRepeatedByAll) {
  Rig rig;
  rig.run = [](int64_t draw, int64_t replica) {
    ReplicaOutcome outcome = seconds(10);
    outcome.repeat_step = draw == 4 && replica == 1;
    return outcome;
  };
  rig.repeat = [](int64_t draw, int64_t replica) {
    EXPECT_EQ(draw, 4);
    return seconds(13 + replica);
  };
  const SimRun run = rig.simulate();
  // Nine iterations of 12 s, one of 10 + 15 + 2.
  EXPECT_DOUBLE_EQ(run.seconds_calm, 9 * 12 + 27);
  EXPECT_EQ(run.repeated_steps, 1);
  EXPECT_EQ(run.peak_bytes, 1'015);
  EXPECT_TRUE(run.series[4].repeated);
  EXPECT_EQ(run.events, (10 * 3 + 3) * 100);
}

TEST(JobLoop, ARepetitionCanDieToo) {
  Rig rig;
  rig.run = [](int64_t draw, int64_t) {
    ReplicaOutcome outcome = seconds(10);
    outcome.repeat_step = draw == 0;
    return outcome;
  };
  rig.repeat = [](int64_t, int64_t) {
    ReplicaOutcome outcome = seconds(6);
    outcome.died = true;
    return outcome;
  };
  const SimRun run = rig.simulate();
  EXPECT_EQ(run.ooms, 1);
  EXPECT_DOUBLE_EQ(run.lost_s, 16);
}

TEST(JobLoop, TheSeriesIsThinnedAndKeepsDeaths) {
  Rig rig;
  rig.options.iterations = 1'000;
  rig.options.series_limit = 10;
  rig.run = [](int64_t draw, int64_t) {
    ReplicaOutcome outcome = seconds(10);
    outcome.died = draw == 333 || draw == 777;
    return outcome;
  };
  const SimRun run = rig.simulate();
  ASSERT_EQ(run.series.size(), 12u);
  EXPECT_EQ(std::count_if(run.series.begin(), run.series.end(),
                          [](const SimIteration& one) { return one.died; }),
            2);
  EXPECT_EQ(run.series[0].iteration, 0);
  EXPECT_EQ(run.series[1].iteration, 100);
}

TEST(JobLoop, ProgressSeesEveryIterationAndCanStop) {
  Rig rig;
  std::vector<int64_t> seen;
  rig.options.progress = [&](int64_t done, int64_t total) {
    EXPECT_EQ(total, 10);
    seen.push_back(done);
    return done < 6;
  };
  EXPECT_EQ(rig.simulate().iterations, 6);
  EXPECT_EQ(seen, (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));
}

TEST(JobLoop, ThreadsDoNotChangeAByte) {
  Rig rig;
  rig.figures.replicas = 7;
  rig.options.iterations = 200;
  rig.interruptions.failures_per_day = 200;
  // Times, deaths and repetitions that look random and depend on draw and replica alone.
  rig.run = [](int64_t draw, int64_t replica) {
    const int64_t mixed = (draw * 7'919 + replica * 104'729) % 1'009;
    ReplicaOutcome outcome = seconds(10 + mixed % 7);
    outcome.died = mixed < 3;
    outcome.repeat_step = mixed > 1'005;
    outcome.imbalance = 1 + static_cast<double>(mixed) / 1'009;
    outcome.mitigated_ranks = mixed % 3;
    return outcome;
  };
  rig.repeat = [](int64_t draw, int64_t replica) { return seconds(20 + (draw + replica) % 3); };
  rig.options.threads = 1;
  const SimRun one = rig.simulate();
  EXPECT_GT(one.ooms, 0);
  EXPECT_GT(one.repeated_steps, 0);
  EXPECT_GT(one.failures, 0);
  for (const int threads : {1, 2, 5}) {
    rig.options.threads = threads;
    EXPECT_EQ(to_json(rig.simulate()).dump(), to_json(one).dump()) << threads;
  }
}

TEST(JobLoop, AnErrorOfAReplicaComesThroughFromAnyThread) {
  Rig rig;
  rig.run = [](int64_t draw, int64_t) -> ReplicaOutcome {
    if (draw == 6) throw std::runtime_error("six");
    return seconds(1);
  };
  for (const int threads : {1, 3}) {
    rig.options.threads = threads;
    EXPECT_THROW(rig.simulate(), std::runtime_error);
  }
}

TEST(DrawOf, FirstTriesAreTheIterationsThemselves) {
  EXPECT_EQ(draw_of(0, 0), 0);
  EXPECT_EQ(draw_of(123, 0), 123);
  EXPECT_NE(draw_of(123, 1), draw_of(123, 2));
}

}  // namespace
}  // namespace bagualu
