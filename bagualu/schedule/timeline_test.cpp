#include "bagualu/schedule/timeline.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "bagualu/base/error.h"
#include "bagualu/graph/native_moe.h"
#include "bagualu/graph/test_models.h"

namespace bagualu {
namespace {

Graph small_graph() { return build_native_graph(small_moe_spec(), {.seq = 16, .ep_size = 4}); }

int64_t count(const Timeline& timeline, ActionKind kind) {
  return std::count_if(timeline.begin(), timeline.end(),
                       [kind](const Action& action) { return action.kind == kind; });
}

// Position of an action, or -1.
int64_t position(const Timeline& timeline, const Action& action) {
  const auto found = std::find(timeline.begin(), timeline.end(), action);
  return found == timeline.end() ? -1 : found - timeline.begin();
}

TEST(Timeline, UniformPlansSkipWhatTheyMayNotTouch) {
  const Graph graph = small_graph();
  const Plan plan = uniform_plan(graph, kRecompute);
  EXPECT_EQ(plan.residency[graph.find_unit("layer0.router")], kSave);    // pinned
  EXPECT_EQ(plan.residency[graph.find_unit("layer0.dispatch")], kSave);  // behind a collective
  EXPECT_EQ(plan.residency[graph.find_unit("layer0.expert_fc1")], kRecompute);
  EXPECT_EQ(uniform_plan(graph, kOffload).residency[graph.find_unit("layer0.dispatch")], kOffload);
}

TEST(Timeline, NoCollectiveRunsTwice) {
  const Graph graph = small_graph();
  for (const Action& action : build_timeline(graph, uniform_plan(graph, kRecompute))) {
    if (action.kind == ActionKind::kRecompute) {
      EXPECT_EQ(graph.ops[action.id].stream, Stream::kCompute) << graph.ops[action.id].name;
    }
  }
}

TEST(Timeline, EveryOperatorRunsOnceEachWay) {
  const Graph graph = small_graph();
  const auto with_backward = std::count_if(graph.ops.begin(), graph.ops.end(),
                                           [](const auto& op) { return op.has_backward; });
  for (ResidencyId r = 0; r < residencies().size(); ++r) {
    const Timeline timeline = build_timeline(graph, uniform_plan(graph, r));
    EXPECT_EQ(count(timeline, ActionKind::kForward), static_cast<int64_t>(graph.ops.size()));
    EXPECT_EQ(count(timeline, ActionKind::kBackward), with_backward);
    EXPECT_EQ(count(timeline, ActionKind::kGate), 2);
    EXPECT_EQ(count(timeline, ActionKind::kOffload), count(timeline, ActionKind::kDrain));
    EXPECT_EQ(count(timeline, ActionKind::kOffload), count(timeline, ActionKind::kReload));
    EXPECT_EQ(count(timeline, ActionKind::kReload), count(timeline, ActionKind::kAwait));
    EXPECT_EQ(count(timeline, ActionKind::kEncode), count(timeline, ActionKind::kDecode));
  }
}

TEST(Timeline, AClosureIsRecomputedOnce) {
  // qkv and attn_norm given up: both feed one closure, each producer runs again once per layer.
  const Graph graph = small_graph();
  Plan plan = uniform_plan(graph, kSave);
  for (const char* unit : {"layer0.attn_norm", "layer0.qkv"}) {
    plan.residency[graph.find_unit(unit)] = kRecompute;
  }
  const Timeline timeline = build_timeline(graph, plan);
  EXPECT_EQ(count(timeline, ActionKind::kRecompute), 2);
  const int64_t norm =
      position(timeline, {ActionKind::kRecompute, graph.find_op("layer0.attn_norm")});
  EXPECT_EQ(position(timeline, {ActionKind::kRecompute, graph.find_op("layer0.qkv")}), norm + 1);
}

TEST(Timeline, DroppedExpertIntermediatesAreNeverMaterialised) {
  const Graph graph = small_graph();
  Plan plan = uniform_plan(graph, kSave);
  plan.residency[graph.find_unit("layer0.expert_fc1")] = kRecompute;
  const int fc1 = graph.find_storage("layer0.expert_fc1.out");
  EXPECT_FALSE(is_materialised(graph, plan, fc1));
  for (const Action& action : build_timeline(graph, plan)) {
    const bool of_storage = action.kind == ActionKind::kFree || action.kind == ActionKind::kDrop;
    EXPECT_FALSE(of_storage && action.id == fc1);
    EXPECT_NE(action.kind, ActionKind::kRecompute);
  }
}

TEST(Timeline, EagerDrainFollowsItsOffloadAtOnce) {
  const Graph graph = small_graph();
  Plan plan = uniform_plan(graph, kOffload);
  plan.eager_drain = true;
  const Timeline timeline = build_timeline(graph, plan);
  for (size_t i = 0; i < timeline.size(); ++i) {
    if (timeline[i].kind != ActionKind::kOffload) continue;
    EXPECT_EQ(timeline[i + 1], (Action{ActionKind::kDrain, timeline[i].id}));
  }
}

TEST(Timeline, WithoutPrefetchAReloadIsAwaitedAtOnce) {
  const Graph graph = small_graph();
  Plan plan = uniform_plan(graph, kOffload);
  plan.prefetch = false;
  const Timeline timeline = build_timeline(graph, plan);
  for (size_t i = 0; i < timeline.size(); ++i) {
    if (timeline[i].kind != ActionKind::kReload) continue;
    EXPECT_EQ(timeline[i + 1], (Action{ActionKind::kAwait, timeline[i].id}));
  }
}

class AtSecondGate : public ::testing::Test {
 protected:
  // Runs save-all, or `first`, up to the gate of layer 1.
  void start(const Plan& first) {
    append_forward(graph_, first, state_, timeline_);
    EXPECT_EQ(append_forward(graph_, first, state_, timeline_), 1);
    begin_ = timeline_.size();
  }
  Timeline demote(Plan plan) {
    keep_past_choices(graph_, state_, plan);
    append_demotions(graph_, plan, state_, timeline_);
    return {timeline_.begin() + static_cast<std::ptrdiff_t>(begin_), timeline_.end()};
  }

  const Graph graph_ = small_graph();
  MicrobatchState state_ = initial_state(graph_);
  Timeline timeline_;
  size_t begin_ = 0;
};

TEST_F(AtSecondGate, DemotesWhatIsLiveAndNoLongerRead) {
  start(uniform_plan(graph_, kSave));
  const Timeline done = demote(uniform_plan(graph_, kRecompute));
  EXPECT_EQ(count(done, ActionKind::kDrop), static_cast<int64_t>(done.size()));
  const auto dropped = [&](const char* storage) {
    return position(done, {ActionKind::kDrop, graph_.find_storage(storage)}) >= 0;
  };
  EXPECT_TRUE(dropped("layer0.expert_fc1.out"));  // materialised before, rebuilt in pieces later
  EXPECT_TRUE(dropped("layer1.qkv"));
  EXPECT_FALSE(dropped("layer1.normed_mlp"));  // dispatch_pack reads it after this gate
  EXPECT_FALSE(dropped("layer0.router_logits"));
}

TEST_F(AtSecondGate, DemotedOffloadsAreDrainedAtOnce) {
  start(uniform_plan(graph_, kSave));
  const Timeline done = demote(uniform_plan(graph_, kOffload));
  EXPECT_GT(done.size(), 0u);
  EXPECT_EQ(2 * count(done, ActionKind::kDrain), static_cast<int64_t>(done.size()));
}

TEST_F(AtSecondGate, AnEagerPlanDrainsWhatIsPending) {
  start(uniform_plan(graph_, kOffload));
  EXPECT_FALSE(state_.pending.empty());
  Plan plan = uniform_plan(graph_, kOffload);
  plan.eager_drain = true;
  const Timeline done = demote(plan);
  EXPECT_EQ(count(done, ActionKind::kDrain), static_cast<int64_t>(done.size()));
  EXPECT_TRUE(state_.pending.empty());
}

TEST_F(AtSecondGate, WhatWasGivenUpStaysGivenUp) {
  const Plan first = uniform_plan(graph_, kRecompute);
  start(first);
  Plan plan = uniform_plan(graph_, kSave);
  keep_past_choices(graph_, state_, plan);
  EXPECT_EQ(plan.residency[graph_.find_unit("layer0.qkv")], kRecompute);
  EXPECT_EQ(plan.residency[graph_.find_unit("layer0.expert_fc1")], kRecompute);
  EXPECT_EQ(plan.residency[graph_.find_unit("layer1.expert_fc1")], kSave);  // not created yet
  EXPECT_TRUE(demote(uniform_plan(graph_, kSave)).empty());
}

TEST(Timeline, BackwardBeforeTheEndOfForwardIsABug) {
  const Graph graph = small_graph();
  const Plan plan = uniform_plan(graph, kSave);
  MicrobatchState state = initial_state(graph);
  Timeline timeline;
  append_forward(graph, plan, state, timeline);
  EXPECT_THROW(append_backward(graph, plan, state, timeline), InternalError);
}

}  // namespace
}  // namespace bagualu
