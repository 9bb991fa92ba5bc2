#include "bagualu/sim/job_clock.h"

#include <gtest/gtest.h>

#include <cmath>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr int64_t kS = 1'000'000'000;

Interruptions quiet(int64_t interval) {
  Interruptions all;
  all.restart_s = 100;
  all.checkpoint_interval = interval;
  all.checkpoint_s = 5;
  all.failures_per_day = 0;
  return all;
}

void expect_parts_add_up(const JobTotals& totals) {
  EXPECT_EQ(totals.wall_ns,
            totals.useful_ns + totals.lost_ns + totals.restart_ns + totals.checkpoint_ns);
}

TEST(JobClock, WithoutInterruptionsIterationsAndCheckpointsAddUp) {
  JobClock clock(quiet(3), 1);
  for (int i = 0; i < 7; ++i) clock.complete(10 * kS);
  // 7 iterations of 10 s, checkpoints behind the third and the sixth: 70 + 2 * 5.
  EXPECT_EQ(clock.totals().wall_ns, 80 * kS);
  EXPECT_EQ(clock.totals().useful_ns, 70 * kS);
  EXPECT_EQ(clock.totals().checkpoint_ns, 10 * kS);
  EXPECT_EQ(clock.totals().completed, 7);
  EXPECT_EQ(clock.totals().lost_iterations, 0);
  expect_parts_add_up(clock.totals());
}

TEST(JobClock, ADeathCostsItsTryARestartAndWhatWasDoneSinceTheCheckpoint) {
  JobClock clock(quiet(4), 1);
  for (const int64_t s : {10, 11, 12, 13, 14, 15}) clock.complete(s * kS);
  clock.die(7 * kS);
  clock.complete(16 * kS);
  // A checkpoint behind the fourth; the death loses the fifth and the sixth: 14 + 15, and 7 s of
  // its own try. 10 + 11 + 12 + 13 + 5 + 14 + 15 + (7 + 100 + 14 + 15) + 16 = 232.
  EXPECT_EQ(clock.totals().wall_ns, 232 * kS);
  EXPECT_EQ(clock.totals().useful_ns, 91 * kS);
  EXPECT_EQ(clock.totals().lost_ns, 36 * kS);
  EXPECT_EQ(clock.totals().restart_ns, 100 * kS);
  EXPECT_EQ(clock.totals().lost_iterations, 2);
  EXPECT_EQ(clock.totals().ooms, 1);
  expect_parts_add_up(clock.totals());
}

TEST(JobClock, EveryDeathOfTheSameIterationPaysAgain) {
  JobClock clock(quiet(10), 1);
  clock.complete(10 * kS);
  clock.complete(10 * kS);
  for (int death = 0; death < 3; ++death) clock.die(4 * kS);
  clock.complete(10 * kS);
  // 30 of iterations + 3 * (4 + 100 + 20).
  EXPECT_EQ(clock.totals().wall_ns, 402 * kS);
  EXPECT_EQ(clock.totals().lost_iterations, 6);
  EXPECT_EQ(clock.totals().ooms, 3);
  expect_parts_add_up(clock.totals());
}

TEST(JobClock, RightBehindACheckpointADeathLosesItsOwnTryAlone) {
  JobClock clock(quiet(2), 1);
  clock.complete(10 * kS);
  clock.complete(10 * kS);
  clock.die(3 * kS);
  EXPECT_EQ(clock.totals().wall_ns, (20 + 5 + 3 + 100) * kS);
  EXPECT_EQ(clock.totals().lost_iterations, 0);
}

TEST(JobClock, FailuresComeAtTheirRateAndKeepTheSum) {
  Interruptions all = quiet(50);
  all.failures_per_day = 24;
  JobClock clock(all, 7);
  for (int i = 0; i < 20'000; ++i) clock.complete(10 * kS);
  const JobTotals& totals = clock.totals();
  expect_parts_add_up(totals);
  EXPECT_EQ(totals.completed, 20'000);
  EXPECT_EQ(totals.useful_ns, 200'000 * kS);
  EXPECT_EQ(totals.restart_ns, totals.failures * 100 * kS);
  // One failure per hour of running: restarts do not count. Counts of a Poisson process: within
  // four standard deviations.
  const double hours = static_cast<double>(totals.wall_ns - totals.restart_ns) / (3600.0 * kS);
  EXPECT_NEAR(static_cast<double>(totals.failures), hours, 4 * std::sqrt(hours));
  EXPECT_GT(totals.failures, 30);
  // On average half an interval is done again, less what a checkpoint saves.
  const double each =
      static_cast<double>(totals.lost_iterations) / static_cast<double>(totals.failures);
  EXPECT_NEAR(each, 25, 8);
}

TEST(JobClock, SameSeedSameFailures) {
  Interruptions all = quiet(50);
  all.failures_per_day = 24;
  const auto run = [&](uint64_t seed) {
    JobClock clock(all, seed);
    for (int i = 0; i < 3'000; ++i) clock.complete(10 * kS);
    return clock.totals().wall_ns;
  };
  EXPECT_EQ(run(1), run(1));
  EXPECT_NE(run(1), run(2));
}

TEST(JobClock, AFailureDuringACheckpointMakesItAndItsIterationsBeDoneAgain) {
  Interruptions all = quiet(1);
  all.failures_per_day = 86'400.0 / 1'000;  // every 1,000 s of running
  all.checkpoint_s = 990;
  JobClock clock(all, 3);
  for (int i = 0; i < 200; ++i) clock.complete(10 * kS);
  expect_parts_add_up(clock.totals());
  EXPECT_EQ(clock.totals().checkpoint_ns, 200 * 990 * kS);
  // Nearly every failure hits a checkpoint, which loses the one iteration before it.
  EXPECT_GT(clock.totals().failures, 100);
  EXPECT_GT(clock.totals().lost_iterations, clock.totals().failures * 9 / 10);
}

TEST(JobClock, RefusesAJobThatNeverReachesACheckpoint) {
  Interruptions all = quiet(1'000);
  all.failures_per_day = 86'400;  // every second, iterations of 100 s
  JobClock clock(all, 3);
  EXPECT_THROW(clock.complete(100 * kS), InvalidInput);
}

TEST(JobClock, RefusesWhatNoJobHas) {
  EXPECT_THROW(JobClock(quiet(0), 1), InvalidInput);
  Interruptions all = quiet(1);
  all.restart_s = -1;
  EXPECT_THROW(JobClock(all, 1), InvalidInput);
  all = quiet(1);
  all.checkpoint_s = std::nan("");
  EXPECT_THROW(JobClock(all, 1), InvalidInput);
  all = quiet(1);
  all.failures_per_day = -0.5;
  EXPECT_THROW(JobClock(all, 1), InvalidInput);
}

TEST(IsKept, SpreadsEvenlyAndKeepsNoMoreThanTheLimit) {
  for (const int64_t total : {1, 7, 10, 100, 1'001}) {
    for (const int64_t limit : {1, 3, 10, 99}) {
      int64_t kept = 0, last = -1, widest = 0;
      for (int64_t i = 0; i < total; ++i) {
        if (!is_kept(i, total, limit)) continue;
        widest = std::max(widest, i - last);
        last = i;
        ++kept;
      }
      EXPECT_EQ(kept, std::min(total, limit)) << total << " " << limit;
      EXPECT_LE(widest, (total + limit - 1) / limit) << total << " " << limit;
    }
  }
  EXPECT_FALSE(is_kept(0, 10, 0));
}

}  // namespace
}  // namespace bagualu
