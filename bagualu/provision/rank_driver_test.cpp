#include "bagualu/provision/rank_driver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <thread>

#include "bagualu/provision/floor.h"
#include "bagualu/provision/rank_votes.h"
#include "bagualu/provision/test_setup.h"
#include "bagualu/provision/verify_timeline.h"

namespace bagualu {
namespace {

using testing::IsEmpty;

// One stage, each forward beside the backward before it: 0F0 [0F1 0B0] [0F2 0B1] ... 0B(m-1).
RankProgram fused_program(int microbatches, PassKind backward = PassKind::kBackward) {
  RankProgram program;
  program.passes.push_back({0, PassKind::kForward, 0});
  for (int m = 0; m + 1 < microbatches; ++m) {
    program.passes.push_back({0, PassKind::kForward, m + 1});
    program.passes.push_back({0, backward, m});
  }
  program.passes.push_back({0, backward, microbatches - 1});
  program.fused.assign(program.passes.size(), false);
  for (size_t k = 1; k + 1 < program.passes.size(); k += 2) program.fused[k] = true;
  return program;
}

/// Keeps every flight's own actions, and the order in which communication is issued.
class RecordingHost final : public RankHost {
 public:
  RecordingHost(const SmallModel& setup, std::vector<std::vector<LayerLoad>> loads)
      : setup_(setup), loads_(std::move(loads)) {}

  void open(int slot, int, int microbatch) override {
    ASSERT_EQ(flights_.count(slot), 0u);
    flights_[slot] = microbatch;
  }
  void run(const RankTimeline& actions) override {
    for (const StageAction& one : actions) {
      const int microbatch = flights_.at(one.slot);
      timelines[microbatch].push_back(one.action);
      order.push_back({microbatch, one.action});
      const bool issues = one.action.kind == ActionKind::kForward ||
                          one.action.kind == ActionKind::kBackward ||
                          one.action.kind == ActionKind::kInputGrad;
      if (!issues) continue;
      const OpSpec& op = setup_.graph.ops[static_cast<size_t>(one.action.id)];
      if (op.stream == Stream::kComm || op.kind == OpKind::kRouter) {
        communication.push_back(std::to_string(microbatch) + " " +
                                action_text(setup_.graph, one.action));
      }
    }
  }
  GateCounts counts(int slot, int layer) override {
    return {loads_[static_cast<size_t>(flights_.at(slot))][static_cast<size_t>(layer)], 1.0};
  }
  bool agree(bool mine) override { return votes == nullptr ? mine : votes->agree(mine); }
  void close(int slot) override { flights_.erase(slot); }

  std::map<int, Timeline> timelines;  ///< by micro-batch
  std::vector<std::pair<int, Action>> order;
  std::vector<std::string> communication;
  RankVotes* votes = nullptr;

 private:
  const SmallModel& setup_;
  std::vector<std::vector<LayerLoad>> loads_;
  std::map<int, int> flights_;  ///< micro-batch by slot
};

struct Driven {
  RankRun run;
  std::unique_ptr<RecordingHost> host;
};

Driven drive(const SmallModel& setup, const ProvisionContext& context, const RankProgram& program,
             std::vector<std::vector<LayerLoad>> loads, RankVotes* votes = nullptr) {
  Driven driven;
  driven.host = std::make_unique<RecordingHost>(setup, std::move(loads));
  driven.host->votes = votes;
  const auto policy = make_policy("adaptive", context, {});
  RankDriver driver({{0, &context, policy.get()}},
                    {.activation_budget_bytes = context.activation_budget_bytes}, *driven.host);
  driven.run = driver.run(program);
  return driven;
}

void expect_sound(const SmallModel& setup, const ProvisionContext& context, const Driven& driven,
                  size_t microbatches) {
  ASSERT_TRUE(driven.run.deaths.empty());
  if (context.activation_budget_bytes > 0) {
    ASSERT_LE(driven.run.memory.peak_bytes, context.activation_budget_bytes);
  }
  ASSERT_EQ(driven.run.memory.live_bytes, 0);
  ASSERT_EQ(driven.run.memory.host_live_bytes, 0);
  ASSERT_EQ(driven.host->timelines.size(), microbatches);
  for (const auto& [microbatch, timeline] : driven.host->timelines) {
    ASSERT_THAT(verify_timeline(setup.graph, timeline), IsEmpty()) << microbatch;
  }
}

TEST(RankDriver, RunsAForwardBesideABackwardAndEachTimelineStaysSound) {
  const SmallModel setup({.layers = 4, .dense_first = true, .shared = true});
  const ProvisionContext context = setup.with_budget(0);
  std::vector<std::vector<LayerLoad>> loads(5, setup.even());
  const Driven driven = drive(setup, context, fused_program(5), loads);
  expect_sound(setup, context, driven, 5);
  // Three gates cut a forward into four segments; four pairs.
  EXPECT_EQ(driven.run.overlapped_segments, 16);
  EXPECT_EQ(driven.run.serialised_segments, 0);
  int changes = 0;
  for (size_t i = 1; i < driven.host->order.size(); ++i) {
    changes += driven.host->order[i].first != driven.host->order[i - 1].first ? 1 : 0;
  }
  EXPECT_GT(changes, 40);
}

TEST(RankDriver, NeverOverBudgetWhateverTheRoutingAndOnlyMemoryStopsOverlap) {
  const SmallModel setup({.layers = 3});
  const Floor floor = compute_floor(setup.graph, setup.context.worst_case, 2);
  const int64_t top = 2 * setup.save_all_bytes(4.0);
  std::mt19937 random(11);
  int overlapped = 0, serialised = 0;
  for (int step = 0; step < 8; ++step) {
    const ProvisionContext context = setup.with_budget(
        floor.activation_bytes + (top - floor.activation_bytes) * step * step / 49);
    for (int i = 0; i < 12; ++i) {
      std::vector<std::vector<LayerLoad>> loads;
      for (int m = 0; m < 5; ++m) loads.push_back(random_routing(setup, random));
      const Driven driven = drive(setup, context, fused_program(5), loads);
      expect_sound(setup, context, driven, 5);
      if (HasFatalFailure()) return;
      overlapped += driven.run.overlapped_segments;
      serialised += driven.run.serialised_segments;
      if (step == 7) {
        EXPECT_EQ(driven.run.serialised_segments, 0);
      }
    }
  }
  EXPECT_GT(overlapped, 0);
  EXPECT_GT(serialised, 0);
}

// Ranks of one expert group with loads and states of their own. Were the order of communication a
// rank's own business, they would wait for each other for ever.
TEST(RankDriver, RanksOfAGroupIssueTheSameCommunicationWhateverTheirLoads) {
  constexpr int kRanks = 4, kMicrobatches = 4;
  const SmallModel setup({.layers = 3, .dense_first = true});
  const Floor floor = compute_floor(setup.graph, setup.context.worst_case, 2);
  const ProvisionContext context =
      setup.with_budget(floor.activation_bytes + setup.save_all_bytes() / 2);
  for (int seed = 0; seed < 20; ++seed) {
    RankVotes votes(kRanks);
    std::vector<Driven> ranks(kRanks);
    std::vector<std::thread> threads;
    for (int r = 0; r < kRanks; ++r) {
      std::mt19937 random(static_cast<unsigned>(100 * seed + r));
      std::vector<std::vector<LayerLoad>> loads;
      for (int m = 0; m < kMicrobatches; ++m) loads.push_back(random_routing(setup, random));
      threads.emplace_back([&, r, loads] {
        ranks[static_cast<size_t>(r)] =
            drive(setup, context, fused_program(kMicrobatches), loads, &votes);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Driven& one : ranks) {
      expect_sound(setup, context, one, kMicrobatches);
      ASSERT_EQ(one.host->communication, ranks[0].host->communication) << seed;
    }
  }
}

}  // namespace
}  // namespace bagualu
