#include "bagualu/provision/verify_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "bagualu/graph/megatron_moe.h"
#include "bagualu/graph/test_models.h"
#include "bagualu/provision/test_graphs.h"
#include "bagualu/provision/test_setup.h"
#include "bagualu/provision/verify_timeline.h"

namespace bagualu {
namespace {

using ::testing::HasSubstr;

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
  EXPECT_THAT(
      verify_plan(setup.graph, uniform_plan(setup.graph, kSave), setup.even(), 0).violations,
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

MemoryReplay replay_of(const Graph& graph, const Plan& plan, const std::vector<LayerLoad>& loads) {
  MemoryReplay replay;
  replay_memory(graph, plan, memory_table(graph, loads), build_timeline(graph, plan), 0, replay);
  return replay;
}

TEST(VerifyPlan, PeakEqualsTheReplayOnAnyGraphClosuresThroughUnsavedOutputsIncluded) {
  std::mt19937 random(2);
  int closures = 0;
  for (int i = 0; i < 2000; ++i) {
    const Graph graph = random_graph(random);
    const Plan plan = random_plan(graph, random);
    const std::vector<LayerLoad> loads(2);
    const VerifiedPlan verified = verify_plan(graph, plan, loads, 0);
    ASSERT_THAT(verified.violations, testing::IsEmpty()) << "graph " << i;
    ASSERT_EQ(verified.peak_bytes, replay_of(graph, plan, loads).peak_bytes) << "graph " << i;
    ASSERT_EQ(replay_of(graph, plan, loads).live_bytes, 0) << "graph " << i;
    std::set<int> again;
    for (const Action& action : build_timeline(graph, plan)) {
      if (action.kind != ActionKind::kRecompute) continue;
      ASSERT_TRUE(again.insert(action.id).second) << "graph " << i << " op " << action.id;
      for (int s : graph.ops[action.id].creates) closures += graph.storages[s].unit < 0 ? 1 : 0;
    }
  }
  EXPECT_GT(closures, 500);  // outputs that were made again only for a closure
}

TEST(VerifyPlan, PeakEqualsTheReplayOnTheMegatronProfile) {
  std::mt19937 random(3);
  for (const MegatronGraphOptions& options :
       {MegatronGraphOptions{.seq = 64, .ep_size = 1},
        MegatronGraphOptions{.seq = 64, .ep_size = 4, .fp8_twins = true},
        MegatronGraphOptions{.seq = 64, .ep_size = 4, .first_layer = 1, .has_embedding = false}}) {
    const Graph graph = build_megatron_graph(rich_moe_spec(), options);
    const std::vector<LayerLoad> loads(static_cast<size_t>(graph.layers), LayerLoad{100, 50});
    for (int i = 0; i < 100; ++i) {
      const Plan plan = random_plan(graph, random);
      const VerifiedPlan verified = verify_plan(graph, plan, loads, 0);
      ASSERT_THAT(verified.violations, testing::IsEmpty());
      ASSERT_EQ(verified.peak_bytes, replay_of(graph, plan, loads).peak_bytes) << "plan " << i;
      ASSERT_THAT(verify_timeline(graph, build_timeline(graph, plan)), testing::IsEmpty());
    }
  }
}

// x: 4 MiB in fp32; its bf16 copy: 2 MiB.
struct Twins {
  explicit Twins(bool fp8 = false) : graph(precision_twins(fp8)) {}
  VerifiedPlan verify(ResidencyId x, ResidencyId copies, int64_t claimed_bytes = 0) const {
    Plan plan = uniform_plan(graph, kSave);
    plan.residency.assign(graph.units.size(), copies);
    plan.residency[graph.find_unit("x")] = x;
    return verify_plan(graph, plan, {LayerLoad{}}, 0, claimed_bytes);
  }
  Graph graph;
};

TEST(PrecisionTwins, TheCopyIsCastAgainFromItsOrigin) {
  const Twins twins;
  const VerifiedPlan kept = twins.verify(kSave, kSave);
  EXPECT_TRUE(kept.ok());
  EXPECT_EQ(kept.freed_bytes, 0);
  const VerifiedPlan dropped = twins.verify(kSave, kRecompute, 2 * kMiB);
  EXPECT_TRUE(dropped.ok());
  EXPECT_EQ(dropped.freed_bytes, 2 * kMiB);
}

TEST(PrecisionTwins, TheCopyDoesNotRestoreItsOrigin) {
  EXPECT_THAT(Twins().verify(kRecompute, kSave).violations,
              testing::ElementsAre(HasSubstr("x cannot be rebuilt")));
  // Neither if the graph says that the copy is where x comes from.
  Twins twins;
  twins.graph.units[0].rebuild = Rebuild::kOp;
  twins.graph.storages[0].derived_from = 1;
  twins.graph.storages[1].derived_from = -1;
  EXPECT_THAT(twins.verify(kRecompute, kSave).violations,
              testing::ElementsAre(HasSubstr("x is derived from x_bf16, which is newer")));
  // Nor if its producer reads the copy.
  twins.graph.storages[0].derived_from = -1;
  twins.graph.ops[0].reads = {1};
  EXPECT_THAT(twins.verify(kRecompute, kSave).violations,
              testing::ElementsAre(HasSubstr("input reads x_bf16 before it is there")));
}

TEST(PrecisionTwins, OffloadingTheOriginFreesItsOwnBytesOnly) {
  const Twins twins;
  const VerifiedPlan one = twins.verify(kOffload, kSave, 4 * kMiB);
  EXPECT_TRUE(one.ok());
  EXPECT_EQ(one.freed_bytes, 4 * kMiB);
  EXPECT_THAT(twins.verify(kOffload, kSave, 6 * kMiB).violations,
              testing::ElementsAre("claims to free 6291456 bytes and frees 4194304"));
}

TEST(PrecisionTwins, BothGoIfTheCopyIsCastAfterTheReload) {
  const Twins twins;
  const VerifiedPlan both = twins.verify(kOffload, kRecompute, 6 * kMiB);
  EXPECT_TRUE(both.ok());
  EXPECT_EQ(both.freed_bytes, 6 * kMiB);
  Plan plan = uniform_plan(twins.graph, kRecompute);
  plan.residency[0] = kOffload;
  EXPECT_THAT(timeline_to_text(twins.graph, build_timeline(twins.graph, plan)),
              HasSubstr("reload x\nawait x\nrecompute cast\nbackward use"));
}

TEST(PrecisionTwins, RowAndColumnCopiesAreTwoStoragesAndBothNeedTheOrigin) {
  const Twins twins(/*fp8=*/true);
  EXPECT_EQ(twins.verify(kSave, kRecompute).freed_bytes, 4 * kMiB);     // 2 + 1 + 1
  EXPECT_EQ(twins.verify(kOffload, kRecompute).freed_bytes, 8 * kMiB);  // and x
  EXPECT_FALSE(twins.verify(kRecompute, kRecompute).ok());
  // Without x in backward, casts make it again through its producer; not through a collective.
  Graph graph = twins.graph;
  graph.storages[0].unit = -1;
  graph.units[0] = graph.units.back();
  graph.units.pop_back();
  for (size_t u = 0; u < graph.units.size(); ++u) {
    for (int s : graph.units[u].storages) graph.storages[s].unit = static_cast<int>(u);
  }
  std::erase(graph.ops.back().bwd_saved, 0);
  const Plan plan = uniform_plan(graph, kRecompute);
  EXPECT_EQ(verify_plan(graph, plan, {LayerLoad{}}, 0).freed_bytes, 4 * kMiB);
  EXPECT_TRUE(verify_plan(graph, plan, {LayerLoad{}}, 0).ok());
  graph.ops[0].stream = Stream::kComm;
  EXPECT_THAT(verify_plan(graph, plan, {LayerLoad{}}, 0).violations,
              testing::Contains(HasSubstr("repeat the collective input")));
}

TEST(VerifyPlan, RefusesARebuildThatWouldRouteAgain) {
  GraphBuilder b;
  const int x = b.saved("x", 640, Rebuild::kNever);
  b.op("input", {}, {x}, {});
  const int map = b.saved("row_map", 64, Rebuild::kNever);
  b.graph.units.back().pinned = true;
  const int scores = b.storage("scores", 128);
  b.op("router", {x}, {map, scores}, {map, x});
  const int y = b.saved("y", 64, Rebuild::kOp);
  b.op("gated", {scores}, {y}, {y});
  const Graph graph = b.finish();
  Plan plan = uniform_plan(graph, kSave);
  EXPECT_TRUE(verify_plan(graph, plan, {LayerLoad{}}, 0).ok());
  plan.residency[graph.find_unit("y")] = kRecompute;
  EXPECT_THAT(verify_plan(graph, plan, {LayerLoad{}}, 0).violations,
              testing::ElementsAre(HasSubstr("repeat router, which makes the pinned row_map")));
}

TEST(VerifyPlan, RefusesToGiveUpViewsOfPersistentMemory) {
  Twins twins;
  StorageSpec& x = twins.graph.storages[0];
  x.persistent = true;
  EXPECT_THAT(twins.verify(kSave, kSave).violations,
              testing::UnorderedElementsAre(HasSubstr("in a unit that may be given up"),
                                            HasSubstr("whose bytes are counted there")));
  x.bytes = {};
  twins.graph.units[0].pinned = true;
  EXPECT_TRUE(twins.verify(kSave, kRecompute).ok());
  for (const ResidencyId choice : {kRecompute, kOffload}) {
    EXPECT_THAT(twins.verify(choice, kSave).violations,
                testing::Contains(HasSubstr("x is a view of persistent memory, not to")));
  }
}

TEST(VerifyPlan, RefusesWhatIsNeverReturned) {
  Twins twins;
  twins.graph.ops.back().bwd_saved = {0};
  EXPECT_THAT(twins.verify(kSave, kSave).violations,
              testing::ElementsAre("x_bf16 is still held after the backward"));
}

// Without expert parallelism rows is a gather of normed_mlp into memory of its own: to offload it
// while normed_mlp stays is no double claim, only dearer than gathering again.
TEST(VerifyPlan, OffloadedRowsAreFreedAlthoughTheirOriginStays) {
  const SmallModel setup({.ep_size = 1});
  const std::vector<int64_t> bytes = setup.graph.storage_bytes(setup.even());
  Plan plan = uniform_plan(setup.graph, kSave);
  plan.residency[setup.graph.find_unit("layer1.dispatch")] = kOffload;
  const int64_t freed = bytes[setup.graph.find_storage("layer1.rows")] +
                        bytes[setup.graph.find_storage("layer1.row_probs")];
  ASSERT_EQ(setup.graph.storages[setup.graph.find_storage("layer1.rows")].derived_from,
            setup.graph.find_storage("layer1.normed_mlp"));
  EXPECT_EQ(verify_plan(setup.graph, plan, setup.even(), 0, freed).freed_bytes, freed);
  EXPECT_FALSE(verify_plan(setup.graph, plan, setup.even(), 0, freed + 1).ok());
}

}  // namespace
}  // namespace bagualu
