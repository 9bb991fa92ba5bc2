#include "bagualu/provision/verify_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "bagualu/provision/test_setup.h"

namespace bagualu {
namespace {

using ::testing::HasSubstr;

Plan random_plan(const Graph& graph, std::mt19937& random) {
  Plan plan = uniform_plan(graph, kSave);
  for (size_t u = 0; u < graph.units.size(); ++u) {
    if (graph.units[u].pinned) continue;
    auto choice = static_cast<ResidencyId>(random() % residencies().size());
    if (residencies()[choice].needs_rebuild && graph.units[u].rebuild == Rebuild::kNever) {
      choice = kOffload;
    }
    plan.residency[u] = choice;
  }
  plan.eager_drain = random() % 2 == 0;
  plan.prefetch = random() % 2 == 0;
  return plan;
}

TEST(VerifyPlan, PeakEqualsTheReplayByteForByteOnRandomPlans) {
  std::mt19937 random(1);
  for (const CaseOptions& options :
       {CaseOptions{.layers = 1}, CaseOptions{.layers = 3, .ep_size = 1},
        CaseOptions{.layers = 4, .dense_first = true, .shared = true}}) {
    const SmallModel setup(options);
    for (int i = 0; i < 300; ++i) {
      const Plan plan = random_plan(setup.graph, random);
      const std::vector<LayerLoad> loads = random_routing(setup, random);
      const VerifiedPlan verified = verify_plan(setup.graph, plan, loads, 0);
      EXPECT_THAT(verified.violations, testing::IsEmpty());
      ASSERT_EQ(verified.peak_bytes, setup.peak(plan, loads)) << "plan " << i;
    }
  }
}

TEST(VerifyPlan, NamesEveryBrokenRule) {
  const SmallModel setup({});
  const Graph& graph = setup.graph;
  Plan plan = uniform_plan(graph, kSave);
  plan.residency[graph.find_unit("layer0.router")] = kOffload;
  plan.residency[graph.find_unit("layer1.dispatch")] = kRecompute;
  plan.residency[graph.find_unit("layer1.qkv")] = 77;
  EXPECT_THAT(verify_plan(graph, plan, setup.even(), 0).violations,
              testing::UnorderedElementsAre(HasSubstr("layer0.router is pinned"),
                                            HasSubstr("layer1.dispatch cannot be rebuilt"),
                                            HasSubstr("layer1.qkv has no registered residency")));
  plan = uniform_plan(graph, kSave);
  plan.residency.pop_back();
  EXPECT_FALSE(verify_plan(graph, plan, setup.even(), 0).ok());
  EXPECT_FALSE(verify_plan(graph, uniform_plan(graph, kSave), {}, 0).ok());
}

TEST(VerifyPlan, RefusesAStorageCountedTwice) {
  SmallModel setup({});
  setup.graph.units[1].storages.push_back(setup.graph.units[0].storages.front());
  EXPECT_THAT(verify_plan(setup.graph, uniform_plan(setup.graph, kSave), setup.even(), 0).violations,
              testing::Contains(HasSubstr("is counted in 2 units")));
}

TEST(VerifyPlan, OnlyTheOriginalRestoresItsDerivedStorage) {
  SmallModel setup({.ep_size = 1});
  Graph& graph = setup.graph;
  const int rows = graph.find_storage("layer0.rows");
  const int normed = graph.find_storage("layer0.normed_mlp");
  ASSERT_EQ(graph.storages[rows].derived_from, normed);
  graph.storages[normed].derived_from = rows;
  EXPECT_THAT(verify_plan(graph, uniform_plan(graph, kSave), setup.even(), 0).violations,
              testing::UnorderedElementsAre(HasSubstr("newer"), HasSubstr("each other"),
                                            HasSubstr("each other")));
}

TEST(VerifyPlan, ComparesThePeakWithTheBudget) {
  const SmallModel setup({});
  const Plan plan = uniform_plan(setup.graph, kSave);
  const int64_t peak = setup.peak(plan, setup.even());
  EXPECT_TRUE(verify_plan(setup.graph, plan, setup.even(), peak).ok());
  EXPECT_THAT(verify_plan(setup.graph, plan, setup.even(), peak - 1).violations,
              testing::ElementsAre(HasSubstr("above the budget")));
}

}  // namespace
}  // namespace bagualu
