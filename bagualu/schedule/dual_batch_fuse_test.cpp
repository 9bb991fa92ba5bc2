#include "bagualu/schedule/dual_batch_fuse.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bagualu/schedule/dual_batch_reference.h"

namespace bagualu {
namespace {

using ::testing::ElementsAre;

ChainOp compute(int64_t ns) { return {ns, Resource::kCompute, false, 0}; }
ChainOp comm(int64_t ns) { return {ns, Resource::kComm, false, 0}; }

TEST(Fuse, MakesRunsOfOneResourceOneOperator) {
  DualBatchInstance instance;
  instance.forward = {compute(1), compute(2), compute(3), comm(4), comm(5), compute(6)};
  const FusedInstance fused = fuse(instance);
  EXPECT_THAT(fused.forward_end, ElementsAre(3, 5, 6));
  EXPECT_EQ(fused.instance.forward[0].ns, 6);
  EXPECT_EQ(fused.instance.forward[1].ns, 9);
  const ScheduleItem f0{ItemKind::kForward, 0};
  const ScheduleItem f1{ItemKind::kForward, 1};
  const auto f = [](int index) { return ScheduleItem{ItemKind::kForward, index}; };
  EXPECT_THAT(expand(fused, {f0, f1}), ElementsAre(f(0), f(1), f(2), f(3), f(4)));
}

TEST(Fuse, EndsRunsWhereARuleWouldBreak) {
  DualBatchInstance instance;
  instance.backward.assign(6, compute(10));
  instance.backward[0].host_sync = true;
  instance.weight_grads = {{1, 2}};
  instance.rebuilds = {{1, 4}};
  // Behind the synchronisation, behind 2 with its weight gradient, before 4 with its rebuild.
  EXPECT_THAT(fuse(instance).backward_end, ElementsAre(1, 3, 4, 6));
}

TEST(Fuse, KeepsOtherChainsTurnsBetween) {
  DualBatchInstance instance;
  instance.forward = {comm(1), comm(1), comm(1)};
  instance.backward = {comm(1)};
  const auto f = [](int index) { return ScheduleItem{ItemKind::kForward, index}; };
  instance.comm_order = {f(0), {ItemKind::kBackward, 0}, f(1), f(2)};
  const FusedInstance fused = fuse(instance);
  EXPECT_THAT(fused.forward_end, ElementsAre(1, 3));
  EXPECT_THAT(fused.instance.comm_order,
              ElementsAre(f(0), ScheduleItem{ItemKind::kBackward, 0}, f(1)));
}

TEST(Fuse, MovesWaitsOfCopiesByATenthOfTheRunAtMost) {
  DualBatchInstance instance;
  instance.forward = {compute(5), compute(95), compute(95), compute(5)};
  instance.copies_out = {{1, 2, -1}};
  // The copy behind operator 2 would start 5 of 200 later in one run: kept. Behind operator 1 it
  // would be 100: the run ends there.
  EXPECT_THAT(fuse(instance).forward_end, ElementsAre(4));
  instance.copies_out = {{1, 1, -1}};
  EXPECT_THAT(fuse(instance).forward_end, ElementsAre(2, 4));
  // Both ends of a copy in one run would wait for each other.
  instance.copies_out = {{1, 2, 3}};
  EXPECT_THAT(fuse(instance).forward_end, ElementsAre(3, 4));
}

TEST(Fuse, ExpandedOrdersFollowEveryRuleAndEndNoLater) {
  SolveOptions exact;
  exact.tolerance_ppm = 0;
  int fewer = 0;
  for (int k = 0; k < 800; ++k) {
    SmallInstances instances(static_cast<uint64_t>(k));
    const DualBatchInstance instance =
        instances.next(static_cast<SmallKind>(k % kSmallKinds), k % 2 == 0);
    const FusedInstance fused = fuse(instance);
    check_instance(fused.instance);
    fewer += fused.instance.forward.size() < instance.forward.size();
    const DualBatchSchedule schedule = solve(fused.instance, exact);
    ASSERT_LE(replay(instance, expand(fused, schedule.order)).makespan_ns, schedule.makespan_ns)
        << k;
    ASSERT_GE(schedule.makespan_ns, solve(instance, exact).makespan_ns) << k;
  }
  EXPECT_GT(fewer, 50);
}

}  // namespace
}  // namespace bagualu
