#include "bagualu/provision/verify_timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "bagualu/provision/test_graphs.h"
#include "bagualu/provision/test_setup.h"

namespace bagualu {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(VerifyTimeline, AcceptsEveryPlansTimeline) {
  std::mt19937 random(1);
  for (int i = 0; i < 500; ++i) {
    const Graph graph = random_graph(random);
    const Timeline timeline = build_timeline(graph, random_plan(graph, random));
    ASSERT_THAT(verify_timeline(graph, timeline), IsEmpty()) << timeline_to_text(graph, timeline);
  }
  const SmallModel setup({.layers = 4, .dense_first = true, .shared = true});
  for (int i = 0; i < 200; ++i) {
    const Timeline timeline = build_timeline(setup.graph, random_plan(setup.graph, random));
    ASSERT_THAT(verify_timeline(setup.graph, timeline), IsEmpty());
  }
}

TEST(VerifyTimeline, AcceptsWhatEveryPolicyDoes) {
  const SmallModel setup({.layers = 4});
  const ProvisionContext context =
      setup.with_budget(std::max(setup.floor_bytes(), setup.save_all_bytes(1.1)));
  std::mt19937 random(2);
  for (const std::string& name : policy_names()) {
    PolicyOptions options;
    options.recompute_modules = {"moe_act"};
    const auto policy = make_policy(name, context, options);
    for (int i = 0; i < 20; ++i) {
      const DrivenMicrobatch run =
          drive_microbatch(context, *policy, random_routing(setup, random));
      ASSERT_THAT(verify_timeline(setup.graph, run.timeline), IsEmpty()) << name;
    }
  }
}

struct TwinTimeline {
  TwinTimeline() : graph(precision_twins()) {
    Plan plan = uniform_plan(graph, kRecompute);
    plan.residency[0] = kOffload;
    timeline = build_timeline(graph, plan);
    // forward input, cast, use; x on its way, drained and reloaded; x_bf16 dropped and cast again.
  }

  size_t find(ActionKind kind, int id) const {
    return static_cast<size_t>(std::find(timeline.begin(), timeline.end(), Action{kind, id}) -
                               timeline.begin());
  }
  void erase(ActionKind kind, int id) {
    ASSERT_LT(find(kind, id), timeline.size());
    timeline.erase(timeline.begin() + static_cast<std::ptrdiff_t>(find(kind, id)));
  }
  void replace(ActionKind kind, int id, ActionKind by) {
    ASSERT_LT(find(kind, id), timeline.size());
    timeline[find(kind, id)].kind = by;
  }
  std::vector<std::string> violations() const { return verify_timeline(graph, timeline); }

  Graph graph;
  Timeline timeline;
};

TEST(VerifyTimeline, RefusesToReturnBytesWhileACopyIsUnderWay) {
  TwinTimeline twins;
  EXPECT_THAT(twins.violations(), IsEmpty());
  twins.replace(ActionKind::kDrain, 0, ActionKind::kFree);
  EXPECT_THAT(twins.violations(),
              Contains(HasSubstr("(free x): its copy to the host is not drained")));
  twins = {};
  twins.replace(ActionKind::kDrain, 0, ActionKind::kDrop);
  EXPECT_THAT(twins.violations(), Contains(HasSubstr("its copy to the host is not drained")));
  twins = {};
  twins.replace(ActionKind::kAwait, 0, ActionKind::kFree);
  EXPECT_THAT(twins.violations(),
              Contains(HasSubstr("(free x): its copy to the device is under way")));
}

TEST(VerifyTimeline, RefusesReadsOfWhatIsNotThere) {
  TwinTimeline twins;
  twins.erase(ActionKind::kAwait, 0);
  EXPECT_THAT(
      twins.violations(),
      Contains(HasSubstr("(recompute cast): it reads x, which is on its way to the device")));
  twins = {};
  twins.erase(ActionKind::kRecompute, 1);
  EXPECT_THAT(twins.violations(),
              Contains(HasSubstr("(backward use): it reads x_bf16, which is dropped")));
  twins = {};
  twins.erase(ActionKind::kReload, 0);
  EXPECT_THAT(twins.violations(), Contains(HasSubstr("(await x): it is on the host")));
}

TEST(VerifyTimeline, EveryStorageIsReturnedOnce) {
  TwinTimeline twins;
  twins.erase(ActionKind::kFree, 0);
  EXPECT_THAT(twins.violations(), ElementsAre("x is on the device at the end"));
  twins = {};
  twins.timeline.push_back({ActionKind::kFree, 0});
  EXPECT_THAT(twins.violations(), ElementsAre(HasSubstr("(free x): it is not on the device")));
  twins.timeline.push_back({ActionKind::kFree, 99});
  EXPECT_THAT(twins.violations(), Contains(HasSubstr("names what is not there")));
}

TEST(VerifyTimeline, OperatorsRunInOrderAndOnce) {
  TwinTimeline twins;
  twins.erase(ActionKind::kBackward, 1);
  EXPECT_THAT(twins.violations(),
              ElementsAre(HasSubstr("(backward input): the backward before it is missing")));
  twins = {};
  twins.erase(ActionKind::kForward, 2);
  EXPECT_THAT(twins.violations(), Contains(HasSubstr("the forward is not over")));
  twins = {};
  twins.timeline.push_back({ActionKind::kBackward, 1});
  EXPECT_THAT(twins.violations(), Contains(HasSubstr("(backward cast): its turn is another")));
}

TEST(VerifyTimeline, WhatIsPinnedPersistentOrLostForGoodStays) {
  TwinTimeline twins;
  twins.graph.units[0].pinned = true;
  EXPECT_THAT(twins.violations(), ElementsAre(HasSubstr("(offload x): it is pinned")));
  twins = {};
  twins.graph.storages[0].persistent = true;
  EXPECT_THAT(twins.violations(),
              ElementsAre(HasSubstr("(offload x): it is a view of persistent memory")));
  twins = {};
  twins.graph.units[1].rebuild = Rebuild::kNever;
  EXPECT_THAT(twins.violations(), ElementsAre(HasSubstr("(drop x_bf16): it cannot be rebuilt")));
  twins = {};
  twins.graph.ops[1].stream = Stream::kComm;
  EXPECT_THAT(twins.violations(), Contains(HasSubstr("it would repeat a collective")));
}

TEST(VerifyTimeline, ACommunicationIsAwaitedBeforeWhatFollowsIt) {
  const SmallModel setup({.layers = 1});  // two expert-parallel ranks
  const Timeline timeline = build_timeline(setup.graph, uniform_plan(setup.graph, kSave));
  ASSERT_THAT(verify_timeline(setup.graph, timeline), IsEmpty());
  int ends = 0;
  for (size_t i = 0; i < timeline.size(); ++i) {
    const ActionKind kind = timeline[i].kind;
    if (kind != ActionKind::kForwardEnd && kind != ActionKind::kBackwardEnd) continue;
    ++ends;
    Timeline without = timeline;
    without.erase(without.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT_THAT(verify_timeline(setup.graph, without),
                Contains(HasSubstr("the communication before it is not awaited")));
    // Its source is gone before the end.
    Timeline early = timeline;
    std::swap(early[i], early[i + 1]);
    EXPECT_FALSE(verify_timeline(setup.graph, early).empty());
  }
  EXPECT_EQ(ends, 4);  // dispatch and combine, both ways
}

}  // namespace
}  // namespace bagualu
