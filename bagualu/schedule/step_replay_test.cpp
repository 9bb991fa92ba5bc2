#include "bagualu/schedule/step_replay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

int add_transfer(RankStep& rank, TransferStream stream, const std::string& channel,
                 const std::string& key) {
  rank.transfers.push_back({stream, "t" + std::to_string(rank.transfers.size()), channel, key, 1});
  return static_cast<int>(rank.transfers.size()) - 1;
}

void add_event(RankStep& rank, std::vector<int> issues, std::vector<int> awaits,
               StepAction action = StepAction::kForward) {
  StepEvent event;
  event.action = action;
  event.name = "e" + std::to_string(rank.events.size());
  event.issues = std::move(issues);
  event.awaits = std::move(awaits);
  rank.events.push_back(event);
}

ReplayTimes times_of(const std::vector<RankStep>& ranks, std::vector<std::vector<int64_t>> event_ns,
                     std::vector<std::vector<int64_t>> transfer_ns) {
  ReplayTimes times;
  for (const RankStep& rank : ranks) {
    times.start_ns.push_back(0);
    times.tail_ns.push_back(0);
    times.lead_ns.emplace_back(rank.events.size(), 0);
  }
  times.event_ns = std::move(event_ns);
  times.transfer_ns = std::move(transfer_ns);
  return times;
}

// Rank 0 computes 10 and issues the exchange, computes 20 beside it and awaits it; rank 1 computes
// 25 first. The exchange of 12 starts at 25 and ends at 37: rank 0, done at 30, waits 7; rank 1,
// with 5 more, 7 from 30.
TEST(StepReplay, ACollectiveStartsWhenItsLastMemberIssuesIt) {
  std::vector<RankStep> ranks(2);
  for (RankStep& rank : ranks) {
    const int exchange = add_transfer(rank, TransferStream::kComm, "ep", "ep:0");
    add_event(rank, {exchange}, {});
    add_event(rank, {}, {});
    add_event(rank, {}, {exchange}, StepAction::kForwardEnd);
  }
  const StepReplay at =
      replay_step(ranks, times_of(ranks, {{10, 20, 0}, {25, 5, 0}}, {{12}, {12}}));
  EXPECT_THAT(at.transfers[0], ElementsAre(ReplayInterval{25, 37}));
  EXPECT_EQ(at.events[0][2], (ReplayInterval{30, 37}));
  EXPECT_EQ(at.events[1][2], (ReplayInterval{30, 37}));
  EXPECT_THAT(at.wait_ns, ElementsAre(7, 7));
  EXPECT_EQ(at.step_ns, 37);
}

// Two copies of 30 and 10 issued at 5 and 10: the second runs 35-45 behind the first; on a channel
// of its own it would run 10-20.
TEST(StepReplay, AChannelRunsOneTransferAfterTheOther) {
  for (bool same : {true, false}) {
    std::vector<RankStep> ranks(1);
    const int first = add_transfer(ranks[0], TransferStream::kToHost, "d2h", "");
    const int second = add_transfer(ranks[0], TransferStream::kToDevice, same ? "d2h" : "h2d", "");
    add_event(ranks[0], {first}, {}, StepAction::kOffload);
    add_event(ranks[0], {second}, {}, StepAction::kReload);
    add_event(ranks[0], {}, {second}, StepAction::kAwait);
    add_event(ranks[0], {}, {first}, StepAction::kDrain);
    const StepReplay at = replay_step(ranks, times_of(ranks, {{5, 5, 1, 1}}, {{30, 10}}));
    EXPECT_EQ(at.transfers[0][1], same ? (ReplayInterval{35, 45}) : (ReplayInterval{10, 20}));
    EXPECT_EQ(at.step_ns, same ? 47 : 36);
  }
}

TEST(StepReplay, AnEventThatAwaitsWhatItIssuesIsOneSynchronousCall) {
  std::vector<RankStep> ranks(2);
  for (RankStep& rank : ranks) {
    const int sum = add_transfer(rank, TransferStream::kComm, "dp", "dp:0");
    add_event(rank, {}, {});
    add_event(rank, {sum}, {sum}, StepAction::kOther);
  }
  // Issued at 3 and 8, ends at 12, and 1 of its own.
  const StepReplay at = replay_step(ranks, times_of(ranks, {{3, 1}, {8, 1}}, {{4}, {4}}));
  EXPECT_EQ(at.step_ns, 13);
  EXPECT_THAT(at.wait_ns, ElementsAre(9, 4));
}

TEST(StepReplay, DifferentOrdersOnACommunicatorAreNamed) {
  std::vector<RankStep> ranks(2);
  for (int r : {0, 1}) {
    RankStep& rank = ranks[static_cast<size_t>(r)];
    rank.rank = r;
    const int a = add_transfer(rank, TransferStream::kComm, "ep", r == 0 ? "ep:a" : "ep:b");
    const int b = add_transfer(rank, TransferStream::kComm, "ep", r == 0 ? "ep:b" : "ep:a");
    add_event(rank, {a, b}, {});
    add_event(rank, {}, {a}, StepAction::kForwardEnd);
  }
  try {
    replay_step(ranks, times_of(ranks, {{1, 1}, {1, 1}}, {{1, 1}, {1, 1}}));
    FAIL() << "no error";
  } catch (const InternalError& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 0: forward_end e1 of micro-batch -1 waits for t0 "
                                        "ep:a; rank 1: forward_end e1"));
  }
}

TEST(StepReplay, AMemberThatWasNotTracedIsRefused) {
  std::vector<RankStep> ranks(1);
  add_event(ranks[0], {add_transfer(ranks[0], TransferStream::kComm, "ep", "ep:0")}, {});
  EXPECT_THROW(measured_times(ranks), InvalidInput);
}

// A random step of three ranks: collectives of all and of pairs in one order, copies, waits.
std::vector<RankStep> random_step(std::mt19937& random) {
  std::vector<RankStep> ranks(3);
  std::vector<std::vector<int>> open(3);
  for (int r = 0; r < 3; ++r) ranks[static_cast<size_t>(r)].rank = r;
  for (int turn = 0; turn < 60; ++turn) {
    const size_t alone = random() % 4;  // 3: all
    for (size_t r = 0; r < 3; ++r) {
      if (alone != 3 && r == alone) continue;
      RankStep& rank = ranks[r];
      switch (turn % 3) {
        case 0: {
          const std::string group = "g" + std::to_string(alone);
          const int n =
              add_transfer(rank, TransferStream::kComm, group, group + std::to_string(turn));
          open[r].push_back(n);
          add_event(rank, {n}, {});
          break;
        }
        case 1: {
          const int n = add_transfer(rank, TransferStream::kToHost, "d2h", "");
          open[r].push_back(n);
          add_event(rank, {n}, {}, StepAction::kOffload);
          break;
        }
        default:
          if (open[r].empty()) continue;
          add_event(rank, {}, {open[r].front()}, StepAction::kForwardEnd);
          open[r].erase(open[r].begin());
      }
    }
  }
  return ranks;
}

// What a replay says happened, traced, gives its times back and is replayed as itself; so does a
// step whose ranks begin and pause at random.
TEST(StepReplay, AStepReplayedWithItsOwnTimesIsItself) {
  std::mt19937 random(3);
  const auto drawn = [&random](uint32_t most) { return static_cast<int64_t>(random() % most); };
  for (int i = 0; i < 200; ++i) {
    std::vector<RankStep> ranks = random_step(random);
    ReplayTimes times;
    for (const RankStep& rank : ranks) {
      times.start_ns.push_back(rank.rank == 0 ? 0 : drawn(20));
      times.tail_ns.push_back(drawn(20));
      times.lead_ns.emplace_back();
      times.event_ns.emplace_back();
      times.transfer_ns.emplace_back();
      for (size_t e = 0; e < rank.events.size(); ++e) {
        times.lead_ns.back().push_back(drawn(5));
        times.event_ns.back().push_back(drawn(30));
      }
      for (size_t n = 0; n < rank.transfers.size(); ++n) {
        times.transfer_ns.back().push_back(drawn(60));
      }
    }
    const StepReplay first = replay_step(ranks, times);
    for (size_t r = 0; r < ranks.size(); ++r) {
      ranks[r].start_ns = times.start_ns[r];
      for (size_t e = 0; e < ranks[r].events.size(); ++e) {
        ranks[r].events[e].start_ns = first.events[r][e].start_ns;
        ranks[r].events[e].end_ns = first.events[r][e].end_ns;
      }
      for (size_t n = 0; n < ranks[r].transfers.size(); ++n) {
        ranks[r].transfers[n].start_ns = first.transfers[r][n].start_ns;
        ranks[r].transfers[n].end_ns = first.transfers[r][n].end_ns;
      }
      ranks[r].end_ns = ranks[r].events.back().end_ns + times.tail_ns[r];
      ASSERT_EQ(step_fault(ranks[r]), "");
    }
    const StepReplay again = replay_step(ranks, measured_times(ranks));
    ASSERT_TRUE(again.events == first.events) << i;
    ASSERT_TRUE(again.transfers == first.transfers) << i;
    ASSERT_EQ(again.step_ns, first.step_ns);
    ASSERT_EQ(measured_step_ns(ranks), again.step_ns);
  }
}

// The longest of twenty is the tail, of three none is.
TEST(MeanTimes, APartTakesTheMeanOfItsKindWithoutTheTail) {
  for (const auto& [common, last, mean] : {std::tuple(2, 98, 37), std::tuple(19, 1000, 7)}) {
    std::vector<RankStep> ranks(1);
    add_event(ranks[0], {}, {});
    MeanTimes means;
    int64_t start = 0;
    for (int i = 0; i <= common; ++i) {
      const int64_t ns = i == common ? last : 7;
      ranks[0].start_ns = ranks[0].events[0].start_ns = start;
      ranks[0].end_ns = ranks[0].events[0].end_ns = start + ns;
      means.add(ranks, measured_times(ranks));
      start += 2000;
    }
    EXPECT_EQ(replay_step(ranks, means.of(ranks)).step_ns, mean);
  }
}

// An exchange of one name takes 10 when a forward issues it and 30 when a backward does.
TEST(MeanTimes, ATransferTakesTheMeanOfThoseThatTheSameActionIssued) {
  std::vector<RankStep> ranks(1);
  int64_t now = 0;
  for (const StepAction action : {StepAction::kForward, StepAction::kBackward}) {
    const int64_t ns = action == StepAction::kForward ? 10 : 30;
    ranks[0].transfers.push_back({TransferStream::kComm, "dispatch", "", "", 1, now, now + ns});
    const int number = static_cast<int>(ranks[0].transfers.size()) - 1;
    add_event(ranks[0], {number}, {}, action);
    add_event(ranks[0], {}, {number}, StepAction::kOther);
    for (size_t i = ranks[0].events.size() - 2; i < ranks[0].events.size(); ++i) {
      ranks[0].events[i].start_ns = now;
      now = i % 2 == 0 ? now : now + ns;
      ranks[0].events[i].end_ns = now;
    }
  }
  ranks[0].end_ns = now;
  MeanTimes means;
  means.add(ranks, measured_times(ranks));
  EXPECT_EQ(means.of(ranks).transfer_ns[0], (std::vector<int64_t>{10, 30}));
  EXPECT_EQ(replay_step(ranks, means.of(ranks)).step_ns, 40);
}

// The second one is disturbed: over 1.3 times the fastest of those around it. Rank 1 has no last
// step.
TEST(PredictSteps, AStepIsPredictedFromTheUndisturbedOnesAroundIt) {
  std::vector<RankStep> trace;
  for (int64_t ns : {11, 100, 12, 13}) {
    for (int rank : {0, 1}) {
      RankStep step;
      step.rank = rank;
      step.step = static_cast<int64_t>(trace.size()) / 2;
      add_event(step, {}, {});
      step.end_ns = step.events[0].end_ns = ns;
      trace.push_back(step);
    }
  }
  const std::vector<StepPrediction> all = predict_steps(trace);
  ASSERT_EQ(all.size(), 4U);
  for (const StepPrediction& step : all) EXPECT_EQ(step.predicted_ns, 12) << step.step;
  EXPECT_EQ(all[0].measured_ns, 11);
  EXPECT_DOUBLE_EQ(all[1].error(), -0.88);
  trace.pop_back();
  EXPECT_EQ(predict_steps(trace).size(), 3U);
}

}  // namespace
}  // namespace bagualu
