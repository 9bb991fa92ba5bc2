#include "bagualu/schedule/dual_batch_bounds.h"

#include <gtest/gtest.h>

#include <vector>

#include "bagualu/schedule/dual_batch_reference.h"

namespace bagualu {
namespace {

ChainOp compute(int64_t ns) { return {ns, Resource::kCompute, false, 0}; }
ChainOp comm(int64_t ns) { return {ns, Resource::kComm, false, 0}; }

TEST(JacksonBound, RunsTheLongestTailAndLetsItPreempt) {
  // a (head 0, 5, tail 2) runs 0-1; b (head 1, 2, tail 9) preempts it 1-3, ends 3 + 9 = 12; a's
  // rest 3-7 ends 9; c (head 10, 1, tail 0) ends 11.
  std::vector<OneMachineJob> jobs = {{0, 5, 2}, {10, 1, 0}, {1, 2, 9}};
  EXPECT_EQ(jackson_bound_ns(jobs), 12);
  std::vector<OneMachineJob> none;
  EXPECT_EQ(jackson_bound_ns(none), 0);
}

TEST(Akers, GoesAroundTheFirstConflict) {
  // Both want compute first. Forward first: F 0-4, B 4-7; then F's comm 4-9 and B's comm 9-10.
  // Backward first: B 0-3, comm 3-4, F 3-7, comm 7-12. The former ends sooner: 10.
  EXPECT_EQ(akers_ns({compute(4), comm(5)}, {compute(3), comm(1)}), 10);
  EXPECT_EQ(akers_ns({}, {compute(3), comm(1)}), 4);
  EXPECT_EQ(akers_ns({}, {}), 0);
}

TEST(Akers, IsTheOptimumOfTwoChainsAlone) {
  for (SmallKind kind : {SmallKind::kAnyChains, SmallKind::kAlternating}) {
    SmallInstances instances(4);
    for (int k = 0; k < 500; ++k) {
      const DualBatchInstance instance = instances.next(kind, false);
      ASSERT_EQ(akers_ns(instance.forward, instance.backward), EveryOrder(instance).optimum_ns())
          << k;
    }
  }
}

TEST(LowerBound, IsNeverAboveTheOptimum) {
  int tight = 0;
  SmallInstances instances(5);
  for (int k = 0; k < 600; ++k) {
    const DualBatchInstance instance =
        instances.next(static_cast<SmallKind>(k % kSmallKinds), k % 3 == 0);
    const int64_t optimum = EveryOrder(instance).optimum_ns();
    ASSERT_LE(lower_bound_ns(instance), optimum) << k;
    tight += lower_bound_ns(instance) == optimum;
  }
  EXPECT_GT(tight, 400);
}

TEST(CriticalSubset, BoundsAsMuchAsJacksonWherePreemptionDoesNotPay) {
  DualBatchInstance instance;
  instance.forward = {compute(15), comm(9), compute(12), comm(9)};
  instance.backward = {comm(9), compute(24), comm(9), compute(30)};
  instance.weight_grads = {{6, 1}, {5, 3}};
  PrecedenceTimes times;
  times.build(instance);
  std::vector<OneMachineJob> jobs;
  // All compute: 15 + 12 + 24 + 30 + 6 + 5 = 92, from 0 on; behind the last weight gradient
  // nothing comes.
  EXPECT_EQ(subset_bound_ns(times, critical_subset(times)), 92);
  EXPECT_EQ(precedence_bound_ns(times, jobs), 92);
}

TEST(CriticalSubset, IsNeverAboveJackson) {
  SmallInstances instances(6);
  for (int k = 0; k < 400; ++k) {
    const DualBatchInstance instance =
        instances.next(static_cast<SmallKind>(k % kSmallKinds), k % 2 == 0);
    PrecedenceTimes times;
    times.build(instance);
    std::vector<OneMachineJob> jobs;
    ASSERT_LE(subset_bound_ns(times, critical_subset(times)), precedence_bound_ns(times, jobs));
  }
}

}  // namespace
}  // namespace bagualu
