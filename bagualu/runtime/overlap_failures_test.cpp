// A step that fails anywhere leaves every slot closed and every arena as it was, and the next step
// has the numbers that it would have had.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <map>

#include "bagualu/base/error.h"
#include "bagualu/runtime/deadline.h"
#include "bagualu/runtime/overlap_rig.h"

namespace bagualu {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kMicrobatches = 3;

struct Injected : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An operator of forward or backward: as many on every rank, whatever its plans.
bool is_operator(ActionKind kind) {
  return kind == ActionKind::kForward || kind == ActionKind::kBackward ||
         kind == ActionKind::kInputGrad;
}

TrainerOptions failing_options(int64_t world) {
  TrainerOptions options = small_options();
  options.layout.world_size = world;
  options.layout.ep_size = world;
  options.shape.seq = 6;
  return options;
}

// One step after a failed one: nothing is left behind, and the numbers are right.
void expect_recovered(OverlapRank& rank, const StepNumbers& expected, uint64_t shared_seed,
                      uint64_t own_seed) {
  rank.executor.abort_all();
  ASSERT_EQ(rank.executor.open_slots(), 0);
  ASSERT_EQ(rank.host.live_bytes(), 0);
  RandomStep again(rank, kMicrobatches, shared_seed, own_seed);
  const auto found = differences(again.run(), expected);
  ASSERT_TRUE(found.empty()) << found.front();
}

TEST(OverlapFailures, AnExceptionBeforeAnyActionIsRecoveredFrom) {
  DeviceArena& arena = DeviceArena::install(BudgetCounter::kNoBudget);
  OverlapRank rank(rich_moe_spec(), failing_options(1), 0, "", 5);
  const StepNumbers expected = plain_step(rank, kMicrobatches);
  const int64_t base = arena.live_bytes();
  std::map<ActionKind, int> failed_before;
  Random random(5);
  for (int i = 0; i < 120; ++i) {
    RandomStep step(rank, kMicrobatches, i, i);
    int64_t left = 1 + below(random, 600);
    step.before_action = [&](const StageAction& action) {
      if (--left > 0) return;
      ++failed_before[action.action.kind];
      throw Injected("at an action");
    };
    try {
      step.run();
    } catch (const Injected&) {
    }
    rank.executor.abort_all();
    ASSERT_EQ(arena.live_bytes(), base) << i;
    expect_recovered(rank, expected, i, i);
  }
  for (const ActionKind kind :
       {ActionKind::kForward, ActionKind::kBackward, ActionKind::kRecompute, ActionKind::kOffload,
        ActionKind::kDrain, ActionKind::kReload, ActionKind::kAwait, ActionKind::kFree}) {
    EXPECT_GT(failed_before[kind], 0) << static_cast<int>(kind);
  }
}

TEST(OverlapFailures, AnExceptionOnEveryRankWithCommunicationUnderWayIsRecoveredFrom) {
  DeviceArena& arena = DeviceArena::install(BudgetCounter::kNoBudget);
  LoopbackGroup group("exceptions", 2);
  const int64_t base = arena.live_bytes();
  on_every_rank(2, [&](int64_t index) {
    OverlapRank rank(rich_moe_spec(), failing_options(2), index, group.name_of(index), index + 1);
    const StepNumbers expected = plain_step(rank, kMicrobatches);
    Random shared(11);
    for (int i = 0; i < 40; ++i) {
      RandomStep step(rank, kMicrobatches, i, 100 * i + index);
      int64_t left = 1 + below(shared, 250);
      step.before_action = [&](const StageAction& action) {
        if (is_operator(action.action.kind) && --left == 0) throw Injected("at an operator");
      };
      try {
        step.run();
      } catch (const Injected&) {
      }
      expect_recovered(rank, expected, i, i + index);
      if (testing::Test::HasFatalFailure()) return;
    }
  });
  EXPECT_EQ(arena.live_bytes(), base);
  EXPECT_EQ(group.unended(), 0);
}

TEST(OverlapFailures, AFailedCommunicationIsRecoveredFrom) {
  DeviceArena& arena = DeviceArena::install(BudgetCounter::kNoBudget);
  LoopbackGroup group("failed", 2);
  const int64_t base = arena.live_bytes();
  on_every_rank(2, [&](int64_t index) {
    OverlapRank rank(rich_moe_spec(), failing_options(2), index, group.name_of(index), index + 1,
                     {.name = "ep", .job_ranks = {}});
    const StepNumbers expected = plain_step(rank, kMicrobatches);
    Random shared(13);
    for (int i = 0; i < 30; ++i) {
      RandomStep step(rank, kMicrobatches, i, 100 * i + index);
      int64_t left = 1 + below(shared, 120);
      step.before_action = [&](const StageAction& action) {
        // The next to be completed, which both ranks then wait for.
        if (index == 0 && is_operator(action.action.kind) && --left == 0) group.fail_next("cut");
      };
      std::string error;
      try {
        step.run();
      } catch (const PeerLost& lost) {
        error = lost.what();
      }
      EXPECT_THAT(error, AllOf(HasSubstr("group ep, with rank"), HasSubstr("failed: cut")));
      expect_recovered(rank, expected, i, i + index);
      if (testing::Test::HasFatalFailure()) return;
    }
  });
  EXPECT_EQ(arena.live_bytes(), base);
}

TEST(OverlapFailures, AFailedCopyIsRecoveredFrom) {
  DeviceArena& arena = DeviceArena::install(BudgetCounter::kNoBudget);
  OverlapRank rank(rich_moe_spec(), failing_options(1), 0, "", 5);
  const StepNumbers expected = plain_step(rank, kMicrobatches);
  const int64_t base = arena.live_bytes();
  Random random(7);
  int failures = 0;
  for (int i = 0; i < 60; ++i) {
    RandomStep step(rank, kMicrobatches, i, i);
    int64_t left = 1 + below(random, 400);
    step.before_action = [&](const StageAction&) {
      if (--left == 0) {
        rank.transfers.fail_next(i % 2 == 0 ? Direction::kD2H : Direction::kH2D, "bus error");
      }
    };
    try {
      step.run();
    } catch (const TransferFailed& failure) {
      EXPECT_THAT(failure.what(), HasSubstr("bus error"));
      ++failures;
    }
    rank.executor.abort_all();
    ASSERT_EQ(arena.live_bytes(), base) << i;
    try {  // a failure that was not used up
      expect_recovered(rank, expected, i, i);
    } catch (const TransferFailed&) {
      expect_recovered(rank, expected, i, i);
    }
  }
  EXPECT_GT(failures, 30);
}

TEST(OverlapFailures, RunningOutOfBudgetAnywhereIsRecoveredFrom) {
  DeviceArena& arena = DeviceArena::install(BudgetCounter::kNoBudget);
  OverlapRank rank(rich_moe_spec(), failing_options(1), 0, "", 5);
  const StepNumbers expected = plain_step(rank, kMicrobatches);
  const int64_t base = arena.live_bytes();
  Random random(9);
  std::map<std::string, int> failed_in;
  for (int i = 0; i < 100; ++i) {
    arena.mark_peak();
    int64_t needed = 0;
    RandomStep measured(rank, kMicrobatches, i, i);
    measured.after_actions = [&] { needed = arena.peak_bytes() - base; };
    measured.run();
    // Half of them near the peak, where several micro-batches are in flight.
    const int64_t missing = 1 + below(random, i % 2 == 0 ? needed / 30 : needed * 7 / 8);
    arena.set_budget(base + needed - missing);
    RandomStep step(rank, kMicrobatches, i, i);
    try {
      step.run();
      ADD_FAILURE() << i;
    } catch (const OutOfBudget& over) {
      ++failed_in[over.op.substr(0, over.op.find(' '))];
    } catch (const OverBudget&) {  // outside any action: the test's own tokens
      ++failed_in["input"];
    }
    arena.set_budget(BudgetCounter::kNoBudget);
    rank.executor.abort_all();
    ASSERT_EQ(arena.live_bytes(), base) << i;
    expect_recovered(rank, expected, i, i);
  }
  EXPECT_GT(failed_in["forward"], 0);
  EXPECT_GT(failed_in["backward"], 0);
}

TEST(OverlapFailures, ADeadlineEndsTheWaitAndNamesTheActionAndTheRanks) {
  DeviceArena& arena = DeviceArena::install(BudgetCounter::kNoBudget);
  LoopbackGroup group("stalled", 2);
  std::barrier together(2);
  const int64_t base = arena.live_bytes();
  on_every_rank(2, [&](int64_t index) {
    OverlapRank rank(rich_moe_spec(), failing_options(2), index, group.name_of(index), 1,
                     {.name = "ep", .job_ranks = {6, 7}, .deadline_ns = 100'000'000});
    const StepNumbers expected = plain_step(rank, kMicrobatches);
    rank.ep.all_reduce_min(0);
    const Timeline timeline = build_timeline(rank.graph, uniform_plan(rank.graph, kSave));
    rank.executor.open(0, 0, rank.input(0));
    rank.executor.set_plan(0, uniform_plan(rank.graph, kSave));
    const int dispatch = rank.graph.find_op("layer1.dispatch");
    const Action issue{ActionKind::kForward, dispatch}, end{ActionKind::kForwardEnd, dispatch};
    const auto at = std::find(timeline.begin(), timeline.end(), issue);
    rank.executor.run(0, Timeline(timeline.begin(), at));
    together.arrive_and_wait();
    group.stall(true);
    together.arrive_and_wait();
    rank.executor.run(0, {issue});
    std::string error;
    try {
      rank.executor.run(0, {end});
    } catch (const DeadlineExceeded& late) {
      error = late.what();
    }
    EXPECT_THAT(error, AllOf(HasSubstr("forward layer1.dispatch of micro-batch 0"),
                             HasSubstr("group ep, with rank " + std::to_string(7 - index)),
                             HasSubstr("did not end within 100 ms")));
    together.arrive_and_wait();
    group.stall(false);
    rank.executor.abort_all();
    rank.ep.all_reduce_min(0);
    expect_recovered(rank, expected, 1, index);
  });
  EXPECT_EQ(arena.live_bytes(), base);
}

TEST(OverlapFailures, EvaluationBetweenStepsAndAfterFailuresChangesNothing) {
  LoopbackGroup group("evaluation", 2);
  on_every_rank(2, [&](int64_t index) {
    OverlapRank rank(rich_moe_spec(), failing_options(2), index, group.name_of(index), index + 1);
    const StepNumbers expected = plain_step(rank, kMicrobatches);
    const double loss = evaluate(rank, 50);
    Random shared(17);
    for (int i = 0; i < 12; ++i) {
      if (i % 3 == 2) {
        RandomStep step(rank, kMicrobatches, i, i + index);
        int64_t left = 1 + below(shared, 100);
        step.before_action = [&](const StageAction& action) {
          if (is_operator(action.action.kind) && --left == 0) throw Injected("at an operator");
        };
        EXPECT_THROW(step.run(), Injected);
        rank.executor.abort_all();
      }
      EXPECT_EQ(evaluate(rank, 50), loss);
      expect_recovered(rank, expected, i, i + index);
      if (testing::Test::HasFatalFailure()) return;
    }
  });
}

}  // namespace
}  // namespace bagualu
