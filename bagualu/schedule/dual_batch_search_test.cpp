#include "bagualu/schedule/dual_batch_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "bagualu/schedule/dual_batch.h"
#include "bagualu/schedule/dual_batch_reference.h"

namespace bagualu {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr size_t kMostStates = 1'000'000;

SearchLimits everything() {
  SearchLimits limits;
  limits.below_ns = kNever;
  limits.max_labels = kNever;
  return limits;
}

// The search alone: no order and no bound to start from.
struct Bare {
  explicit Bare(const DualBatchInstance& instance) {
    times.build(instance);
    EXPECT_TRUE(search.prepare(instance, times, kMostStates));
  }
  PrecedenceTimes times;
  DualBatchSearch search;
};

class SearchOf : public testing::TestWithParam<SmallKind> {};

TEST_P(SearchOf, SmallInstancesFindsTheBestOfEveryOrder) {
  for (bool pinned : {false, true}) {
    SmallInstances instances(pinned ? 7 : 8);
    for (int k = 0; k < 200; ++k) {
      const DualBatchInstance instance = instances.next(GetParam(), pinned);
      const int64_t optimum = EveryOrder(instance).optimum_ns();
      Bare bare(instance);
      const SearchOutcome outcome = bare.search.pass(everything());
      ASSERT_TRUE(outcome.found && outcome.complete && !outcome.truncated);
      ASSERT_EQ(outcome.makespan_ns, optimum) << k;
      std::vector<ScheduleItem> order;
      bare.search.write_order(order);
      ASSERT_EQ(replay(instance, order).makespan_ns, optimum) << k;
    }
  }
}

TEST_P(SearchOf, SmallInstancesProvesABoundInEveryPass) {
  SmallInstances instances(9);
  int truncated = 0;
  for (int k = 0; k < 200; ++k) {
    const DualBatchInstance instance = instances.next(GetParam(), k % 2 == 0);
    const int64_t optimum = EveryOrder(instance).optimum_ns();
    Bare bare(instance);
    SearchLimits limits = everything();
    limits.beam = 1;
    const SearchOutcome narrow = bare.search.pass(limits);
    ASSERT_TRUE(narrow.found);
    ASSERT_GE(narrow.makespan_ns, optimum);
    ASSERT_LE(std::min(narrow.makespan_ns, narrow.discarded_bound_ns), optimum) << k;
    truncated += narrow.truncated;
    // Nothing ends before the optimum, and the pass that looked for it says so.
    limits.beam = 0;
    limits.below_ns = optimum;
    const SearchOutcome none = bare.search.pass(limits);
    ASSERT_TRUE(!none.found && none.complete);
    ASSERT_GE(none.discarded_bound_ns, optimum);
  }
  if (GetParam() == SmallKind::kEverything) {
    EXPECT_GT(truncated, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, SearchOf,
                         testing::Values(SmallKind::kAnyChains, SmallKind::kAlternating,
                                         SmallKind::kFillers, SmallKind::kEverything));

// Per layer 15 of attention, 9 of dispatch, 12 of experts, 9 of combine, and the backward of it.
DualBatchInstance moe_layers(int layers) {
  DualBatchInstance instance;
  for (int layer = 0; layer < layers; ++layer) {
    for (int k = 0; k < 4; ++k) {
      const bool forward_comm = k % 2 == 1;
      instance.forward.push_back({forward_comm ? 9 : 15 - 3 * (k / 2),
                                  forward_comm ? Resource::kComm : Resource::kCompute, false,
                                  layer});
      instance.backward.push_back({forward_comm ? 20 + 10 * (k / 2) : 9,
                                   forward_comm ? Resource::kCompute : Resource::kComm, false,
                                   layer});
    }
    instance.weight_grads.push_back({6, 4 * layer + 1});
    instance.rebuilds.push_back({4, 4 * layer + 3});
  }
  return instance;
}

TEST(DualBatchSearch, CutsKeepBothChainsInOneWindow) {
  const DualBatchInstance instance = moe_layers(4);
  Bare bare(instance);
  bare.search.set_cuts({{8, 8}});
  SearchLimits limits = everything();
  limits.beam = 2;
  ASSERT_TRUE(bare.search.pass(limits).found);
  std::vector<ScheduleItem> order;
  bare.search.write_order(order);
  int behind = 0;
  for (const ScheduleItem& item : order) {
    if (item.kind != ItemKind::kForward && item.kind != ItemKind::kBackward) continue;
    behind += item.index >= 8;
    EXPECT_TRUE(item.index >= 8 || behind == 0);
  }
  EXPECT_EQ(behind, 16);
  replay(instance, order);
}

TEST(DualBatchSearch, StopsAtItsLimits) {
  const DualBatchInstance instance = moe_layers(4);
  Bare bare(instance);
  SearchLimits limits = everything();
  limits.max_labels = 50;
  SearchOutcome outcome = bare.search.pass(limits);
  EXPECT_FALSE(outcome.complete);
  EXPECT_LE(outcome.labels, 50 + 4);  // the moves of one more label
  limits = everything();
  limits.deadline_at_ns = DualBatchSearch::now_ns();
  outcome = bare.search.pass(limits);
  EXPECT_FALSE(outcome.complete);
  EXPECT_LE(outcome.labels, 70);  // the clock is looked at once in 64 labels
}

TEST(DualBatchSearch, RefusesTablesThatAreTooLarge) {
  const DualBatchInstance instance = moe_layers(4);
  PrecedenceTimes times;
  times.build(instance);
  DualBatchSearch search;
  EXPECT_FALSE(search.prepare(instance, times, 289));  // 17 * 17, and windows on top
}

}  // namespace
}  // namespace bagualu
