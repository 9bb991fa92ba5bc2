#include "bagualu/provision/floor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bagualu/provision/test_setup.h"
#include "bagualu/provision/verify_plan.h"

namespace bagualu {
namespace {

TEST(Floor, SurvivalPlanDropsWhatItCanAndOffloadsTheRest) {
  const SmallModel setup({});
  const Plan plan = survival_plan(setup.graph);
  EXPECT_TRUE(plan.eager_drain);
  EXPECT_FALSE(plan.prefetch);
  EXPECT_EQ(plan.residency[setup.graph.find_unit("layer0.router")], kSave);
  EXPECT_EQ(plan.residency[setup.graph.find_unit("layer0.dispatch")], kOffload);
  EXPECT_EQ(plan.residency[setup.graph.find_unit("layer0.expert_fc1")], kRecompute);
  EXPECT_EQ(plan.residency[setup.graph.find_unit("lm_head")], kRecompute);
}

TEST(Floor, IsTheVerifiedPeakOfTheSurvivalPlanAtTheWorstCase) {
  const SmallModel setup({.dense_first = true, .shared = true});
  const Floor floor = compute_floor(setup.graph, setup.context.worst_case);
  const std::vector<LayerLoad> worst(static_cast<size_t>(setup.graph.layers),
                                     setup.context.worst_case);
  EXPECT_EQ(verify_plan(setup.graph, survival_plan(setup.graph), worst, 0).peak_bytes,
            floor.activation_bytes);
  EXPECT_GT(floor.host_bytes, 0);
  EXPECT_THAT(floor.at, testing::HasSubstr("layer"));
  EXPECT_THAT(floor.at, testing::Not(testing::HasSubstr("\n")));
}

// All others rest under the survival plan: only pinned routing stays on the device.
TEST(Floor, EveryMicrobatchMoreInFlightAddsWhatTheSurvivalPlanHoldsAtRest) {
  const SmallModel setup({});
  const Floor one = compute_floor(setup.graph, setup.context.worst_case);
  const Floor three = compute_floor(setup.graph, setup.context.worst_case, 3);
  const std::vector<LayerLoad> worst(static_cast<size_t>(setup.graph.layers),
                                     setup.context.worst_case);
  int64_t pinned = 0, offloaded = 0;
  const std::vector<int64_t> bytes = setup.graph.storage_bytes(worst);
  for (const UnitSpec& unit : setup.graph.units) {
    for (int s : unit.storages) {
      if (unit.pinned) {
        pinned += bytes[static_cast<size_t>(s)];
      } else if (unit.rebuild == Rebuild::kNever) {
        offloaded += bytes[static_cast<size_t>(s)];
      }
    }
  }
  EXPECT_GT(pinned, 0);
  EXPECT_EQ(three.activation_bytes, one.activation_bytes + 2 * pinned);
  EXPECT_EQ(three.host_bytes, one.host_bytes + 2 * offloaded);
  EXPECT_EQ(rest_bytes(setup.graph, survival_plan(setup.graph), worst), pinned);
}

TEST(Floor, OneByteLessDoesNotCarryTheWorstCase) {
  const SmallModel setup({});
  const int64_t floor = setup.floor_bytes();
  const std::vector<LayerLoad> worst(static_cast<size_t>(setup.graph.layers),
                                     setup.context.worst_case);
  for (const int64_t less : {0, 1}) {
    const ProvisionContext context = setup.with_budget(floor - less);
    const auto policy = make_policy("adaptive", context, {});
    const DrivenMicrobatch run = drive_microbatch(context, *policy, worst);
    EXPECT_EQ(run.memory.peak_bytes <= floor - less, less == 0);
    EXPECT_EQ(run.decisions.back().feasible, less == 0);
    EXPECT_EQ(run.decisions.back().short_by_bytes, less);
  }
}

TEST(Floor, ScaledLoadRoundsUpAndStopsAtTheWorstCase) {
  const LayerLoad balanced{100, 10}, worst{400, 48};
  EXPECT_EQ(scaled_load(balanced, worst, 1.0), balanced);
  EXPECT_EQ(scaled_load(balanced, worst, 0.0), (LayerLoad{0, 0}));
  EXPECT_EQ(scaled_load(balanced, worst, 1.011), (LayerLoad{102, 11}));
  EXPECT_EQ(scaled_load(balanced, worst, 9.0), worst);
}

TEST(Floor, LargestSurvivingFactorIsWhereThePlanBreaks) {
  const SmallModel setup({});
  // save-all with a budget of its own peak at 1.5: survives 1.5 (within the bisection), not 1.6.
  const ProvisionContext context = setup.with_budget(setup.save_all_bytes(1.5));
  const double by_plan = largest_surviving_factor(uniform_plan(setup.graph, kSave), context);
  EXPECT_NEAR(by_plan, 1.5, 0.02);
  EXPECT_DOUBLE_EQ(largest_surviving_factor("save-all", context, {}), by_plan);
  // adaptive at a budget of at least the floor survives the worst case: 4 ranks, so factor 4.
  const ProvisionContext roomy =
      setup.with_budget(std::max(setup.floor_bytes(), context.activation_budget_bytes));
  EXPECT_DOUBLE_EQ(largest_surviving_factor("adaptive", roomy, {}),
                   static_cast<double>(context.worst_case.rows) / context.balanced.rows);
  EXPECT_EQ(largest_surviving_factor("save-all", setup.with_budget(1), {}), 0.0);
}

}  // namespace
}  // namespace bagualu
