#include "bagualu/schedule/pipeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string list_text(const std::vector<PipelinePass>& list) {
  std::string text;
  for (const PipelinePass& pass : list) text += (text.empty() ? "" : " ") + pass_text(pass);
  return text;
}

std::string internal_error_of(const PipelineOrder& order) {
  try {
    simulate(order, equal_times(order, 1, 2));
  } catch (const InternalError& error) {
    return error.what();
  }
  return "no error";
}

// Micro-batches of which one extra forward (or backward) of half a unit costs nothing.
std::vector<int> free_microbatches(int stage, PassKind kind) {
  // In halves: F = 1 is 2, B = 2 is 4, the extra 0.5 is 1; a step of 33 is 66.
  const PipelineOrder order = one_f_one_b(4, 8);
  const PipelineTimes times = equal_times(order, 2, 4);
  std::vector<int> free;
  for (int m = 0; m < 8; ++m) {
    const int64_t cost = exposed_ns(order, times, {{{stage, kind, m}, 1}});
    EXPECT_TRUE(cost == 0 || cost == 1) << cost;
    if (cost == 0) free.push_back(m);
  }
  return free;
}

TEST(OneFOneB, ListsWarmUpSteadyStateAndCoolDown) {
  const PipelineOrder order = one_f_one_b(3, 4);
  ASSERT_EQ(order.ranks.size(), 3U);
  EXPECT_EQ(list_text(order.ranks[0]), "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
  EXPECT_EQ(list_text(order.ranks[1]), "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3");
  EXPECT_EQ(list_text(order.ranks[2]), "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3");
  EXPECT_THROW(one_f_one_b(0, 4), InternalError);
  EXPECT_THROW(one_f_one_b(4, 0), InternalError);
}

TEST(OneFOneB, MicrobatchesInFlight) {
  EXPECT_THAT(in_flight(one_f_one_b(4, 8)), ElementsAre(4, 3, 2, 1));
  EXPECT_THAT(in_flight(one_f_one_b(8, 2)), ElementsAre(2, 2, 2, 2, 2, 2, 2, 1));
  EXPECT_THAT(in_flight(one_f_one_b(1, 8)), ElementsAre(1));
  for (int m = 8; m <= 64; ++m) {
    EXPECT_THAT(in_flight(one_f_one_b(4, m)), ElementsAre(4, 3, 2, 1)) << m;
  }
}

TEST(Interleaved, ActivationsInFlight) {
  // Rank r runs 2 (p - 1 - r) + (v - 1) p forwards ahead and one more before its first backward.
  EXPECT_THAT(in_flight(interleaved(4, 2, 8)), ElementsAre(11, 9, 7, 5));
  for (int m = 8; m <= 64; m += 4) {
    EXPECT_THAT(in_flight(interleaved(4, 2, m)), ElementsAre(11, 9, 7, 5)) << m;
  }
  EXPECT_EQ(interleaved(4, 1, 8), one_f_one_b(4, 8));
}

// Peaks in tenths of a micro-batch's activations, with those of `hot` at 2.5.
std::vector<int64_t> peaks_with_hot(const std::vector<int>& hot) {
  std::vector<std::vector<int64_t>> tenths(4, std::vector<int64_t>(8, 10));
  for (auto& stage : tenths) {
    for (int m : hot) stage[static_cast<size_t>(m)] = 25;
  }
  std::vector<int64_t> peaks;
  for (const ResidentPeak& peak : resident_peaks(one_f_one_b(4, 8), tenths)) {
    peaks.push_back(peak.bytes);
  }
  return peaks;
}

TEST(ResidentPeaks, SpikesOnTopOfTheWarmUp) {
  EXPECT_THAT(peaks_with_hot({2}), ElementsAre(55, 45, 35, 25));
  EXPECT_THAT(peaks_with_hot({6}), ElementsAre(55, 45, 35, 25));
  EXPECT_THAT(peaks_with_hot({2, 3}), ElementsAre(70, 60, 50, 25));
  EXPECT_THAT(peaks_with_hot({0, 1, 2, 3}), ElementsAre(100, 75, 50, 25));
}

TEST(ResidentPeaks, NamesTheMicrobatchesResidentAtEveryMomentOfThePeak) {
  std::vector<std::vector<int64_t>> tenths(4, std::vector<int64_t>(8, 10));
  for (auto& stage : tenths) stage[2] = 25;
  const std::vector<ResidentPeak> peaks = resident_peaks(one_f_one_b(4, 8), tenths);
  std::vector<std::string> moments;
  for (const ResidentMoment& moment : peaks[0].moments) {
    moments.push_back(pass_text(moment.at) + ": " + list_text(moment.resident));
  }
  EXPECT_THAT(moments,
              ElementsAre("0F3: 0F0 0F1 0F2 0F3", "0F4: 0F1 0F2 0F3 0F4", "0F5: 0F2 0F3 0F4 0F5"));
  ASSERT_EQ(peaks[3].moments.size(), 1U);
  EXPECT_EQ(list_text(peaks[3].moments[0].resident), "3F2");
}

// One rank, 100 bytes per forward: 0F0 0F1 0I0 0I1 0W0 0W1 against keeping a share for 0W.
TEST(ResidentPeaks, SplitBackwardsKeepWhatTheWeightGradientNeeds) {
  PipelineOrder order;
  order.stages = 1;
  order.microbatches = 3;
  order.ranks = {{{0, PassKind::kForward, 0},
                  {0, PassKind::kInputGrad, 0},
                  {0, PassKind::kForward, 1},
                  {0, PassKind::kInputGrad, 1},
                  {0, PassKind::kForward, 2},
                  {0, PassKind::kInputGrad, 2},
                  {0, PassKind::kWeightGrad, 0},
                  {0, PassKind::kWeightGrad, 1},
                  {0, PassKind::kWeightGrad, 2}}};
  const std::vector<std::vector<int64_t>> bytes = {{100, 100, 100}};
  const auto peak = [&](int64_t kept) {
    return resident_peaks(order, bytes, {{kept, kept, kept}})[0];
  };
  EXPECT_THAT(in_flight(order), ElementsAre(3));
  EXPECT_EQ(resident_peaks(order, bytes)[0].bytes, 300);
  EXPECT_EQ(peak(100).bytes, 300);
  EXPECT_EQ(peak(40).bytes, 40 + 40 + 100);
  EXPECT_EQ(list_text(peak(40).moments[0].resident), "0F0 0F1 0F2");
  EXPECT_EQ(peak(0).bytes, 100);
  EXPECT_EQ(peak(0).moments.size(), 3U);
  // More than it frees: the input gradient's own result is kept too.
  EXPECT_EQ(peak(150).bytes, 450);
  EXPECT_EQ(pass_text(peak(150).moments[0].at), "0I2");
}

TEST(Simulate, SplitBackwardsSendTheInputGradientFirst) {
  // Rank 1: 1F0 10-20, 1I0 20-32, 1W0 32-40; rank 0: 0F0 0-10, 0I0 32-44, 0W0 44-52.
  PipelineOrder order;
  order.stages = 2;
  order.microbatches = 1;
  for (int r : {0, 1}) {
    order.ranks.push_back(
        {{r, PassKind::kForward, 0}, {r, PassKind::kInputGrad, 0}, {r, PassKind::kWeightGrad, 0}});
  }
  const PipelineTimes times = equal_times(order, PassTimes{10, 12, 8, 0});
  const PipelineRun run = simulate(order, times);
  EXPECT_THAT(run.end_ns[1], ElementsAre(20, 32, 40));
  EXPECT_THAT(run.start_ns[0], ElementsAre(0, 32, 44));
  EXPECT_EQ(run.makespan_ns, 52);
  EXPECT_THAT(run.span_ns, ElementsAre(52, 30));
  EXPECT_EQ(exposed_ns(order, times, {{{1, PassKind::kWeightGrad, 0}, 12}}), 0);
  EXPECT_EQ(exposed_ns(order, times, {{{1, PassKind::kWeightGrad, 0}, 13}}), 1);
  EXPECT_EQ(exposed_ns(order, times, {{{0, PassKind::kInputGrad, 0}, 5}}), 5);
  // A split order needs to know how long the weight gradients are.
  EXPECT_THROW(simulate(order, equal_times(order, 10, 20)), InternalError);
}

TEST(ResidentPeaks, RefuseABackwardWithoutItsForward) {
  PipelineOrder order = one_f_one_b(1, 2);
  std::swap(order.ranks[0][0], order.ranks[0][1]);
  EXPECT_THROW(in_flight(order), InternalError);
}

TEST(Simulate, StepOfEqualTimesAndItsBubble) {
  // (m + p - 1) (F + B) = 11 x 3; each rank works 8 x 3 of it.
  const PipelineOrder order = one_f_one_b(4, 8);
  const PipelineRun run = simulate(order, equal_times(order, 1, 2));
  EXPECT_EQ(run.makespan_ns, 33);
  EXPECT_THAT(run.bubble_ns, Each(9));
  for (int p = 1; p <= 6; ++p) {
    for (int m = 1; m <= 12; ++m) {
      const PipelineOrder any = one_f_one_b(p, m);
      const PipelineRun at = simulate(any, equal_times(any, 3, 5));
      for (int64_t bubble : at.bubble_ns) {
        // bubble / makespan = (p - 1) / (m + p - 1)
        EXPECT_EQ(bubble * (m + p - 1), at.makespan_ns * (p - 1)) << p << " " << m;
      }
    }
  }
}

TEST(Simulate, PassesStartWhenInputsAndRankAreFree) {
  const PipelineOrder order = one_f_one_b(2, 2);
  PipelineTimes times = equal_times(order, 10, 20, 3);
  times.forward_ns[1][0] = 15;
  // 0F0 0-10, 0F1 10-20; 1F0 13-28, 1B0 28-48, 1F1 48-58, 1B1 58-78; 0B0 51-71, 0B1 81-101.
  const PipelineRun run = simulate(order, times);
  EXPECT_THAT(run.start_ns[0], ElementsAre(0, 10, 51, 81));
  EXPECT_THAT(run.end_ns[0], ElementsAre(10, 20, 71, 101));
  EXPECT_THAT(run.start_ns[1], ElementsAre(13, 28, 48, 58));
  EXPECT_EQ(run.makespan_ns, 101);
  EXPECT_THAT(run.bubble_ns, ElementsAre(101 - 60, 101 - 65));
}

TEST(Simulate, StagesOfOneRankSendNothing) {
  // Both stages on one rank: 4 passes in a row, the send time does not count.
  PipelineOrder order;
  order.stages = 2;
  order.microbatches = 1;
  order.ranks = {{{0, PassKind::kForward, 0},
                  {1, PassKind::kForward, 0},
                  {1, PassKind::kBackward, 0},
                  {0, PassKind::kBackward, 0}}};
  EXPECT_EQ(simulate(order, equal_times(order, 1, 2, 100)).makespan_ns, 6);
  EXPECT_THAT(in_flight(order), ElementsAre(2));
}

TEST(Simulate, DeadlockNamesThePassesThatWaitForEachOther) {
  PipelineOrder order = one_f_one_b(2, 2);
  // Rank 0 wants 0B0 before 0F1; rank 1 wants 1F1 before 1B0.
  order.ranks[0] = {{0, PassKind::kForward, 0},
                    {0, PassKind::kBackward, 0},
                    {0, PassKind::kForward, 1},
                    {0, PassKind::kBackward, 1}};
  order.ranks[1] = {{1, PassKind::kForward, 0},
                    {1, PassKind::kForward, 1},
                    {1, PassKind::kBackward, 0},
                    {1, PassKind::kBackward, 1}};
  EXPECT_THAT(internal_error_of(order), AllOf(HasSubstr("rank 0: 0B0 waits for 1B0"),
                                              HasSubstr("rank 1: 1F1 waits for 0F1")));
}

TEST(Simulate, RefusesPassesListedTwiceOrMissing) {
  PipelineOrder order = one_f_one_b(2, 2);
  order.ranks[1].pop_back();
  EXPECT_THAT(internal_error_of(order), HasSubstr("0B1 waits for 1B1, which no rank runs"));
  order = one_f_one_b(2, 2);
  order.ranks[0].push_back({0, PassKind::kForward, 1});
  EXPECT_THAT(internal_error_of(order), AllOf(HasSubstr("0F1"), HasSubstr("listed twice")));
  order = one_f_one_b(2, 2);
  order.ranks[0][0].microbatch = 2;
  EXPECT_THAT(internal_error_of(order), HasSubstr("0F2"));
}

TEST(ExposedTime, OneLongerForwardIsFreeWhereTheStageWaits) {
  EXPECT_THAT(free_microbatches(0, PassKind::kForward), ElementsAre(1, 2, 3));
  EXPECT_THAT(free_microbatches(1, PassKind::kForward), ElementsAre(1, 2));
  EXPECT_THAT(free_microbatches(2, PassKind::kForward), ElementsAre(1));
  EXPECT_THAT(free_microbatches(3, PassKind::kForward), ElementsAre());
}

TEST(ExposedTime, OneLongerBackwardIsFreeWhereTheStageWaits) {
  EXPECT_THAT(free_microbatches(0, PassKind::kBackward), ElementsAre(4, 5, 6));
  EXPECT_THAT(free_microbatches(1, PassKind::kBackward), ElementsAre(5, 6));
  EXPECT_THAT(free_microbatches(2, PassKind::kBackward), ElementsAre(6));
  EXPECT_THAT(free_microbatches(3, PassKind::kBackward), ElementsAre());
}

TEST(ExposedTime, SeveralDelaysShareTheSlackOfTheirPath) {
  const PipelineOrder order = one_f_one_b(4, 8);
  const PipelineTimes times = equal_times(order, 10, 20);
  const auto all = slack(order, times);
  ASSERT_EQ(all[0][1], 20);  // 0F1
  ASSERT_EQ(all[0][2], 40);  // 0F2
  const PassDelay first{{0, PassKind::kForward, 1}, 20};
  const PassDelay second{{0, PassKind::kForward, 2}, 40};
  EXPECT_EQ(exposed_ns(order, times, {first}), 0);
  EXPECT_EQ(exposed_ns(order, times, {second}), 0);
  // 0F2 also waits for the longer 0F1, so it is 20 late in all.
  EXPECT_EQ(exposed_ns(order, times, {first, second}), 20);
  EXPECT_EQ(exposed_ns(order, times, {}), 0);
}

PipelineTimes random_times(const PipelineOrder& order, std::mt19937& random) {
  PipelineTimes times = equal_times(order, 0, 0, static_cast<int64_t>(random() % 4));
  for (auto* table : {&times.forward_ns, &times.backward_ns}) {
    for (auto& row : *table) {
      for (int64_t& ns : row) ns = static_cast<int64_t>(random() % 12);
    }
  }
  return times;
}

TEST(Slack, IsTheLongestDelayThatCostsNothing) {
  std::mt19937 random(11);
  for (int i = 0; i < 60; ++i) {
    const PipelineOrder order =
        one_f_one_b(1 + static_cast<int>(random() % 4), 1 + static_cast<int>(random() % 6));
    const PipelineTimes times = random_times(order, random);
    const auto all = slack(order, times);
    for (size_t r = 0; r < order.ranks.size(); ++r) {
      for (size_t j = 0; j < order.ranks[r].size(); ++j) {
        const PipelinePass& pass = order.ranks[r][j];
        int64_t longest = 0;
        while (exposed_ns(order, times, {{pass, longest + 1}}) == 0) ++longest;
        ASSERT_EQ(all[r][j], longest) << pass_text(pass) << " case " << i;
        ASSERT_EQ(exposed_ns(order, times, {{pass, longest + 7}}), 7) << pass_text(pass);
      }
    }
  }
}

TEST(Slack, SomePassesOfEveryStepHaveNone) {
  std::mt19937 random(12);
  for (int i = 0; i < 20; ++i) {
    const PipelineOrder order = one_f_one_b(3, 5);
    const auto all = slack(order, random_times(order, random));
    int64_t least = all[0][0];
    for (const auto& list : all) {
      for (int64_t ns : list) least = std::min(least, ns);
    }
    EXPECT_EQ(least, 0);
  }
}

}  // namespace
}  // namespace bagualu
