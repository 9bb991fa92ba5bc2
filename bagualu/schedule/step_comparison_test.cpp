#include "bagualu/schedule/step_comparison.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace bagualu {
namespace {

using ::testing::ElementsAre;

StepEvent event(StepAction action, const char* name, int64_t start_ns, int64_t end_ns,
                std::vector<int> issues, std::vector<int> awaits) {
  StepEvent made;
  made.action = action;
  made.name = name;
  made.start_ns = start_ns;
  made.end_ns = end_ns;
  made.issues = std::move(issues);
  made.awaits = std::move(awaits);
  return made;
}

// A rank that computes until `first`, issues the exchange, computes until `second` and awaits the
// exchange, which ends at `exchanged`; 1 ns of its own behind that.
RankStep rank_step(int rank, int64_t step, int64_t first, int64_t second, int64_t exchanged) {
  const int64_t at = 1000 * (step + 1);
  const int64_t end = at + std::max(second, exchanged) + 1;
  RankStep made;
  made.rank = rank;
  made.step = step;
  made.start_ns = at;
  made.end_ns = end;
  made.transfers = {
      {TransferStream::kComm, "exchange", "ep", "ep:0", 8, at + first, at + exchanged}};
  made.events = {event(StepAction::kForward, "a", at, at + first, {0}, {}),
                 event(StepAction::kForward, "b", at + first, at + second, {}, {}),
                 event(StepAction::kForwardEnd, "exchange", at + second, end, {}, {0})};
  return made;
}

// Rank 1 issues at 25, rank 0 at 10, 12, 14 and, in a step that something disturbed, at 40; the
// exchange takes 11 from the later of both.
std::vector<RankStep> four_steps() {
  return {rank_step(0, 0, 10, 30, 36), rank_step(1, 0, 25, 30, 36), rank_step(0, 1, 12, 32, 36),
          rank_step(1, 1, 25, 30, 36), rank_step(0, 2, 40, 60, 51), rank_step(1, 2, 25, 30, 51),
          rank_step(0, 3, 14, 34, 36), rank_step(1, 3, 25, 30, 36)};
}

TEST(StepComparison, EveryStepIsPredictedFromTheStepsAroundIt) {
  const StepComparisons all = compare_steps(four_steps());
  ASSERT_EQ(all.steps.size(), 4U);
  EXPECT_THAT(all.left_out, ElementsAre());
  EXPECT_EQ(all.steps[0].measured_ns, 37);
  EXPECT_EQ(all.steps[2].measured_ns, 61);
  // From the undisturbed steps around any one, rank 0 issues at 12 (step 1: between 10 and 14),
  // rank 1 at 25; over at 36, awaited until 37.
  for (const StepComparison& at : all.steps) EXPECT_EQ(at.predicted_ns, 37);
  const StepComparison& disturbed = all.steps[2];
  EXPECT_EQ(disturbed.executed[0].events[1].end_ns, 3060);
  const RankStep& planned = disturbed.scheduled[0];
  EXPECT_EQ(planned.start_ns, 0);
  EXPECT_EQ(planned.end_ns, 37);
  EXPECT_EQ(planned.events[1].start_ns, 12);
  EXPECT_EQ(planned.events[1].end_ns, 32);
  EXPECT_EQ(planned.transfers[0].start_ns, 12) << "its issue, not the last member's";
  EXPECT_EQ(planned.transfers[0].end_ns, 36);
  EXPECT_EQ(step_fault(planned), "");
}

TEST(StepComparison, WaitsAreWhatIsLeftOfAnAwaitingEvent) {
  const StepComparisons all = compare_steps(four_steps());
  EXPECT_THAT(all.steps[0].executed_wait_ns,
              ElementsAre(ElementsAre(0, 0, 6), ElementsAre(0, 0, 6)));
  EXPECT_THAT(all.steps[0].scheduled_wait_ns,
              ElementsAre(ElementsAre(0, 0, 4), ElementsAre(0, 0, 6)));
  // The disturbed rank found the exchange over; the other waited for it from 30 to 51.
  EXPECT_THAT(all.steps[2].executed_wait_ns,
              ElementsAre(ElementsAre(0, 0, 0), ElementsAre(0, 0, 21)));
}

TEST(StepComparison, AStepThatARankHasNotFinishedIsLeftOut) {
  std::vector<RankStep> steps = four_steps();
  steps.erase(steps.begin() + 3);  // rank 1 of step 1
  const StepComparisons all = compare_steps(steps);
  EXPECT_EQ(all.steps.size(), 3U);
  EXPECT_THAT(all.left_out, ElementsAre(1));
  EXPECT_TRUE(compare_steps({}).steps.empty());
}

}  // namespace
}  // namespace bagualu
