#include "bagualu/schedule/dual_batch_cache.h"

#include <gtest/gtest.h>

#include <random>

#include "bagualu/schedule/dual_batch_reference.h"

namespace bagualu {
namespace {

ChainOp compute(int64_t ns) { return {ns, Resource::kCompute, false, 0}; }
ChainOp comm(int64_t ns) { return {ns, Resource::kComm, false, 0}; }

// One layer of each chain. From 15 << 10 on there is a bucket 1024 wide: eight from 8 << 10 to
// 16 << 10.
constexpr int64_t kAttentionNs = (15 << 10) + 200;

DualBatchInstance one_layer(int64_t attention_ns = kAttentionNs) {
  DualBatchInstance instance;
  instance.forward = {compute(attention_ns), comm(9 << 10), compute(12 << 10), comm(9 << 10)};
  instance.backward = {comm(9 << 10), compute(24 << 10), comm(9 << 10), compute(30 << 10)};
  instance.weight_grads = {{6 << 10, 1}};
  instance.comm_order = pinned_comm_order(instance);
  return instance;
}

TEST(ScheduleCache, ReplaysAKeptOrderOnTheDurationsAtHand) {
  ScheduleCache cache;
  const DualBatchSchedule first = cache.solve(one_layer());
  EXPECT_NE(first.source, ScheduleSource::kCache);
  const DualBatchInstance other = one_layer(kAttentionNs + 100);  // the same bucket
  const DualBatchSchedule hit = cache.solve(other);
  EXPECT_EQ(hit.source, ScheduleSource::kCache);
  EXPECT_EQ(hit.makespan_ns, replay(other, hit.order).makespan_ns);
  EXPECT_EQ(hit.makespan_ns, first.makespan_ns + 100);
  EXPECT_EQ(cache.counts().hits, 1);
  EXPECT_EQ(cache.counts().misses, 1);
}

TEST(ScheduleCache, DoesNotCallAHitOptimalBecauseTheFirstWas) {
  ScheduleCache cache;
  const DualBatchSchedule first = cache.solve(one_layer());
  ASSERT_TRUE(first.optimal());
  EXPECT_TRUE(cache.solve(one_layer()).optimal());  // the same durations: the proof holds
  // Attention shorter by 100 of 15,560: all that is proven is 0.99 of the bound.
  const DualBatchSchedule hit = cache.solve(one_layer(kAttentionNs - 100));
  ASSERT_EQ(hit.source, ScheduleSource::kCache);
  EXPECT_FALSE(hit.optimal());
  EXPECT_LT(hit.bound_ns, first.bound_ns);
}

TEST(ScheduleCache, RefusesAnOrderFarFromTheBoundAndReplacesIt) {
  ScheduleCacheOptions options;
  options.slack_ppm = -1'000'000;  // no hit is good enough
  ScheduleCache cache(options);
  cache.solve(one_layer());
  EXPECT_NE(cache.solve(one_layer()).source, ScheduleSource::kCache);
  EXPECT_EQ(cache.counts().refused, 1);
  EXPECT_EQ(cache.counts().misses, 2);
  EXPECT_EQ(cache.size(), 1U);
}

TEST(ScheduleCache, ComparesWholeKeysWhereHashesCollide) {
  ScheduleCacheOptions options;
  options.hash_bits = 0;  // one hash for all
  ScheduleCache cache(options);
  std::vector<DualBatchInstance> all;
  for (int k = 0; k < 40; ++k) {
    SmallInstances instances(static_cast<uint64_t>(k));
    all.push_back(instances.next(static_cast<SmallKind>(k % kSmallKinds), k % 2 == 0));
    cache.solve(all.back());
  }
  for (const DualBatchInstance& instance : all) {
    const DualBatchSchedule hit = cache.solve(instance);
    EXPECT_EQ(hit.source, ScheduleSource::kCache);
    EXPECT_EQ(hit.makespan_ns, replay(instance, hit.order).makespan_ns);
  }
}

TEST(ScheduleCache, KeysHoldStructureOptionsAndTheCallersState) {
  ScheduleCache cache;
  cache.solve(one_layer());
  DualBatchInstance other = one_layer();
  other.forward[0].host_sync = true;
  EXPECT_NE(cache.solve(other).source, ScheduleSource::kCache);
  other = one_layer();
  other.weight_lag = 0;
  EXPECT_NE(cache.solve(other).source, ScheduleSource::kCache);
  other = one_layer();
  other.comm_order.clear();
  EXPECT_NE(cache.solve(other).source, ScheduleSource::kCache);
  other = one_layer();
  other.forward[1].ns *= 2;  // a link of half the speed
  EXPECT_NE(cache.solve(other).source, ScheduleSource::kCache);
  SolveOptions exact;
  exact.tolerance_ppm = 0;
  EXPECT_NE(cache.solve(one_layer(), exact).source, ScheduleSource::kCache);
  EXPECT_NE(cache.solve(one_layer(), {}, std::vector<int64_t>{1}).source, ScheduleSource::kCache);
  EXPECT_EQ(cache.solve(one_layer(), {}, std::vector<int64_t>{1}).source, ScheduleSource::kCache);
}

TEST(ScheduleCache, DropsTheScheduleNotUsedForLongest) {
  ScheduleCacheOptions options;
  options.capacity = 2;
  ScheduleCache cache(options);
  const DualBatchInstance a = one_layer(1000);
  const DualBatchInstance b = one_layer(2000);
  const DualBatchInstance c = one_layer(4000);
  cache.solve(a);
  cache.solve(b);
  cache.solve(a);  // so that b is the oldest
  cache.solve(c);
  EXPECT_EQ(cache.size(), 2U);
  EXPECT_EQ(cache.counts().evictions, 1);
  EXPECT_EQ(cache.solve(a).source, ScheduleSource::kCache);
  EXPECT_EQ(cache.solve(c).source, ScheduleSource::kCache);
  EXPECT_NE(cache.solve(b).source, ScheduleSource::kCache);
}

TEST(ScheduleCache, DoesNotKeepWhatALimitCutShort) {
  ScheduleCache cache;
  SolveOptions options;
  options.tolerance_ppm = 0;
  options.max_labels = 1;
  int cut = 0;
  for (int k = 0; k < 200; ++k) {
    SmallInstances instances(static_cast<uint64_t>(k));
    const DualBatchInstance instance = instances.next(SmallKind::kEverything, true);
    if (!cache.solve(instance, options).cut_short) continue;
    ++cut;
    EXPECT_NE(cache.solve(instance, options).source, ScheduleSource::kCache);
  }
  EXPECT_GT(cut, 0);
}

TEST(ScheduleCache, HitsKeepWithinTheSlackAndTheirBoundsHold) {
  ScheduleCache cache;
  SolveOptions exact;
  exact.tolerance_ppm = 0;
  std::mt19937_64 random(3);
  int hits = 0;
  for (int k = 0; k < 400; ++k) {
    SmallInstances instances(static_cast<uint64_t>(k));
    DualBatchInstance instance =
        instances.next(static_cast<SmallKind>(k % kSmallKinds), k % 2 == 0);
    cache.solve(instance, exact);
    for (auto* chain : {&instance.forward, &instance.backward}) {
      for (ChainOp& op : *chain) op.ns += op.ns * static_cast<int64_t>(random() % 7) / 100;
    }
    const DualBatchSchedule again = cache.solve(instance, exact);
    const int64_t optimum = EveryOrder(instance).optimum_ns();
    ASSERT_LE(again.bound_ns, optimum) << k;
    ASSERT_EQ(again.makespan_ns, replay(instance, again.order).makespan_ns) << k;
    if (again.source != ScheduleSource::kCache) continue;
    ++hits;
    ASSERT_LE(again.makespan_ns, optimum * 102 / 100) << k;
  }
  EXPECT_GT(hits, 100);
}

}  // namespace
}  // namespace bagualu
