#include "bagualu/provision/plan_cache.h"

#include <gtest/gtest.h>

namespace bagualu {
namespace {

PlanKey key_of(uint64_t word) { return {{word}}; }

TEST(PlanCache, ForgetsTheLeastRecentlyUsed) {
  PlanCache cache(2);
  cache.insert(key_of(1), {.residency = {1}});
  cache.insert(key_of(2), {.residency = {2}});
  ASSERT_NE(cache.find(key_of(1)), nullptr);
  cache.insert(key_of(3), {.residency = {3}});
  EXPECT_EQ(cache.size(), 2u);
  EXPECT_EQ(cache.find(key_of(2)), nullptr);
  ASSERT_NE(cache.find(key_of(1)), nullptr);
  EXPECT_EQ(cache.find(key_of(1))->residency, std::vector<ResidencyId>{1});
  EXPECT_EQ(cache.hits(), 3);
  EXPECT_EQ(cache.misses(), 1);
}

TEST(PlanCache, InsertReplacesThePlanOfAKey) {
  PlanCache cache;
  cache.insert(key_of(1), {.residency = {1}});
  cache.insert(key_of(1), {.residency = {2}});
  EXPECT_EQ(cache.size(), 1u);
  EXPECT_EQ(cache.find(key_of(1))->residency, std::vector<ResidencyId>{2});
}

TEST(PlanCache, CapacityZeroKeepsNothing) {
  PlanCache cache(0);
  cache.insert(key_of(1), {});
  EXPECT_EQ(cache.find(key_of(1)), nullptr);
}

TEST(PlanCache, KeysTellGateFatesAndDrainsApart) {
  MicrobatchState state;
  state.storage.assign(20, StorageFate::kLive);
  std::vector<LayerLoad> loads = {{10, 5}};
  Plan plan{.residency = {kSave}};
  GateInput input;
  input.plan = &plan;
  input.gate = 0;
  input.state = &state;
  input.loads = &loads;
  PlanKey base, other;
  mitigation_key(input, base);
  input.gate = 1;
  mitigation_key(input, other);
  EXPECT_FALSE(base == other);
  input.gate = 0;
  state.storage[19] = StorageFate::kDropped;
  mitigation_key(input, other);
  EXPECT_FALSE(base == other);
  state.storage[19] = StorageFate::kLive;
  state.pending.push_back({3, 1});
  mitigation_key(input, other);
  EXPECT_FALSE(base == other);
  state.pending.clear();
  mitigation_key(input, other);
  EXPECT_TRUE(base == other);

  plan.residency[0] = kOffload;
  mitigation_key(input, other);
  EXPECT_FALSE(base == other);
  plan.residency[0] = kSave;

  mitigation_key(input, base);
  loads[0].rows = 11;
  mitigation_key(input, other);
  EXPECT_FALSE(base == other);
}

}  // namespace
}  // namespace bagualu
