#include "bagualu/schedule/dual_batch_solver.h"

#include <gtest/gtest.h>

#include <random>

#include "bagualu/schedule/dual_batch_greedy.h"

namespace bagualu {
namespace {

// Layers of small operators as a graph has them: attention in 6, experts in 3; hot in the forward,
// so that neither the fixed nor the greedy order is near the bound.
class ManyOperators {
 public:
  explicit ManyOperators(uint64_t seed) : random_(seed) {}

  DualBatchInstance next(int layers, bool pinned) {
    instance_ = {};
    for (int layer = 0; layer < layers; ++layer) {
      add(instance_.forward, Resource::kCompute, 6, 740, layer);
      add(instance_.forward, Resource::kComm, 1, 4300 * 2, layer);
      add(instance_.forward, Resource::kCompute, 3, 1370 * 2, layer);
      add(instance_.forward, Resource::kComm, 1, 6100 * 2, layer);
      add(instance_.backward, Resource::kComm, 1, 3600, layer);
      add(instance_.backward, Resource::kCompute, 3, 1800, layer);
      instance_.weight_grads.push_back({noisy(5100), count() - 1});
      add(instance_.backward, Resource::kComm, 1, 6500, layer);
      instance_.rebuilds.push_back({noisy(900), count()});
      add(instance_.backward, Resource::kCompute, 6, 1600, layer);
      instance_.weight_grads.push_back({noisy(2400), count() - 1});
    }
    if (pinned) instance_.comm_order = pinned_comm_order(instance_);
    return instance_;
  }

 private:
  int count() const { return static_cast<int>(instance_.backward.size()); }
  int64_t noisy(int64_t ns) { return ns * (80 + static_cast<int64_t>(random_() % 41)) * 10; }
  void add(std::vector<ChainOp>& chain, Resource resource, int ops, int64_t ns, int layer) {
    for (int k = 0; k < ops; ++k) chain.push_back({noisy(ns), resource, false, layer});
  }

  std::mt19937_64 random_;
  DualBatchInstance instance_;
};

int64_t hand_made_ns(const DualBatchInstance& instance) {
  return std::min(replay(instance, fixed_order(instance)).makespan_ns,
                  replay(instance, greedy_order(instance)).makespan_ns);
}

TEST(DualBatchSolver, FusedSearchComesNearTheUnfusedOne) {
  SolveOptions unfused;
  unfused.fuse_above_ops = 1'000'000;
  SolveOptions fused_only;
  fused_only.exact = false;
  int64_t with = 0;
  int64_t without = 0;
  ManyOperators many(1);
  for (int k = 0; k < 6; ++k) {
    const DualBatchInstance instance = many.next(2, true);
    with += solve(instance, fused_only).makespan_ns;
    without += solve(instance, unfused).makespan_ns;
  }
  EXPECT_LE(with, without + without / 200);  // half a percent
}

TEST(DualBatchSolver, IsNeverWorseThanHandMadeOrdersWhateverEndsIt) {
  ManyOperators many(2);
  for (int layers : {1, 4, 9}) {
    const DualBatchInstance instance = many.next(layers, layers != 4);
    for (int64_t labels : {0, 1, 100, 20'000}) {
      SolveOptions options;
      options.max_labels = labels;
      const DualBatchSchedule schedule = solve(instance, options);
      EXPECT_LE(schedule.makespan_ns, hand_made_ns(instance));
      EXPECT_GE(schedule.makespan_ns, schedule.bound_ns);
      EXPECT_EQ(schedule.makespan_ns, replay(instance, schedule.order).makespan_ns);
    }
  }
}

TEST(DualBatchSolver, ADeadlineReturnsTheBestOrderSoFar) {
  ManyOperators many(3);
  const DualBatchInstance instance = many.next(12, false);
  SolveOptions options;
  options.tolerance_ppm = 0;
  options.deadline_ns = 1;  // over when the search begins
  const DualBatchSchedule schedule = solve(instance, options);
  EXPECT_TRUE(schedule.cut_short);
  EXPECT_LE(schedule.makespan_ns, hand_made_ns(instance));
  EXPECT_GT(schedule.bound_ns, 0);
}

TEST(DualBatchSolver, EqualCallsGiveEqualOrders) {
  ManyOperators many(4);
  const DualBatchInstance first = many.next(4, false);
  const DualBatchInstance second = many.next(3, true);
  DualBatchSolver used;
  used.solve(second, {});
  const DualBatchSchedule again = used.solve(first, {});
  const DualBatchSchedule fresh = solve(first);
  EXPECT_EQ(again.order, fresh.order);
  EXPECT_EQ(again.bound_ns, fresh.bound_ns);
}

TEST(DualBatchSolver, StopsWithinTheTolerance) {
  ManyOperators many(5);
  const DualBatchInstance instance = many.next(1, true);
  SolveOptions loose;
  loose.tolerance_ppm = 1'000'000;
  const DualBatchSchedule schedule = solve(instance, loose);
  EXPECT_NE(schedule.source, ScheduleSource::kBeam);
  EXPECT_NE(schedule.source, ScheduleSource::kExact);
  SolveOptions absolute;
  absolute.tolerance_ppm = 0;
  absolute.tolerance_ns = schedule.makespan_ns;
  EXPECT_EQ(solve(instance, absolute).order, schedule.order);
}

TEST(DualBatchSolver, WindowsHelpWhereTheChainsAreLong) {
  ManyOperators many(6);
  const DualBatchInstance instance = many.next(16, false);
  SolveOptions windows;
  windows.exact = false;
  windows.beam = 2;
  SolveOptions limited = windows;
  limited.max_labels = 30'000;
  const DualBatchSchedule schedule = solve(instance, limited);
  EXPECT_LE(schedule.makespan_ns, hand_made_ns(instance));
  EXPECT_EQ(schedule.source, ScheduleSource::kBeam);
}

TEST(DualBatchSolver, SolvesWhatHasOneChainOrNothing) {
  for (int forward : {0, 1}) {
    for (int backward : {0, 1}) {
      DualBatchInstance instance = ManyOperators(7).next(2, false);
      if (forward == 0) instance.forward.clear();
      if (backward == 0) {
        instance.backward.clear();
        instance.weight_grads.clear();
        instance.rebuilds.clear();
      }
      const DualBatchSchedule schedule = solve(instance);
      EXPECT_EQ(schedule.makespan_ns, replay(instance, schedule.order).makespan_ns);
      if (backward == 0) {
        EXPECT_TRUE(schedule.optimal());
      }
    }
  }
}

}  // namespace
}  // namespace bagualu
