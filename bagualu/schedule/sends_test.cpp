#include "bagualu/schedule/sends.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>
#include <tuple>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

using ::testing::ElementsAre;

// Ranks as processes that do what a plan says, step by step; a send completes once its receive is
// posted and the network has moved it. Knows nothing of how the plan was made.
class Ranks {
 public:
  Ranks(const OverlapOrder& order, const SendPlan& plan)
      : order_(order),
        plan_(plan),
        next_(plan.at.size(), 0),
        step_(plan.at.size(), 0),
        posted_(plan.messages.size(), 0),
        issued_(plan.messages.size(), 0),
        arrived_(plan.messages.size(), 0) {}

  enum Step { kPost, kReceive, kAwaitSent, kRun, kAwaitAtOnce, kSteps };

  // Awaits every send behind its pass, whatever the plan says.
  void await_at_once() { at_once_ = true; }
  // Awaits sends before the inputs of the pass.
  void await_first() { await_first_ = true; }

  bool done(size_t r) const { return next_[r] > plan_.at[r].size(); }

  // Does the next step of a rank; false if it waits.
  bool advance(size_t r) {
    if (next_[r] == plan_.at[r].size()) {
      if (!all(arrived_, plan_.await_at_end[r])) return false;
      ++next_[r];
      return true;
    }
    const PassTraffic& at = plan_.at[r][next_[r]];
    switch (step_[r]) {
      case kPost:
        for (int n : at.post) mark(posted_, n);
        break;
      case kReceive:
        if (!all(arrived_, await_first_ ? at.await_sent : at.receive)) return false;
        break;
      case kAwaitSent:
        if (!all(arrived_, await_first_ ? at.receive : at.await_sent)) return false;
        break;
      case kRun:
        for (int n : at.send) mark(issued_, n);
        break;
      default:
        if (at_once_ && !all(arrived_, at.send)) return false;
    }
    if (++step_[r] == kSteps) {
      step_[r] = 0;
      next_[r] += order_.fused[r][next_[r]] ? 2 : 1;
    }
    return true;
  }

  // Moves one message that is posted and issued; false if there is none.
  bool move(size_t first) {
    const size_t count = arrived_.size();
    for (size_t i = 0; i < count; ++i) {
      const size_t n = (first + i) % count;
      if (arrived_[n] || !posted_[n] || !issued_[n]) continue;
      arrived_[n] = 1;
      return true;
    }
    return false;
  }

  // The laziest run in which rank r stands before the awaits of its sends at `pass`: other ranks do
  // no step that this does not need.
  void reach(size_t r, size_t pass) {
    while (next_[r] < pass || step_[r] != kAwaitSent) {
      if (next_[r] < plan_.at[r].size() && step_[r] == kReceive) {
        for (int n : plan_.at[r][next_[r]].receive) run_sender(n);
      }
      // Bytes are in flight or the plan is wrong, which the caller's own checks tell.
      if (next_[r] < plan_.at[r].size() && step_[r] == kAwaitSent) {
        for (int n : plan_.at[r][next_[r]].await_sent) {
          if (!posted_[static_cast<size_t>(n)]) throw InternalError("awaits what is not posted");
          arrived_[static_cast<size_t>(n)] = 1;
        }
      }
      if (!advance(r)) throw InternalError("rank waits");
    }
  }

  bool posted(int n) const { return posted_[static_cast<size_t>(n)] != 0; }

 private:
  static void mark(std::vector<char>& flags, int n) {
    if (flags[static_cast<size_t>(n)]++) throw InternalError("done twice");
  }
  static bool all(const std::vector<char>& flags, const std::vector<int>& numbers) {
    for (int n : numbers) {
      if (!flags[static_cast<size_t>(n)]) return false;
    }
    return true;
  }

  void run_sender(int n) {
    const auto at = static_cast<size_t>(n);
    const auto from = static_cast<size_t>(plan_.messages[at].from_rank);
    while (!issued_[at]) {
      if (step_[from] < kAwaitSent) reach(from, next_[from]);
      for (int m : plan_.at[from][next_[from]].await_sent) {
        if (!posted_[static_cast<size_t>(m)]) throw InternalError("awaits what is not posted");
        arrived_[static_cast<size_t>(m)] = 1;
      }
      if (!advance(from)) throw InternalError("sender waits");
    }
    arrived_[at] = 1;
  }

  const OverlapOrder& order_;
  const SendPlan& plan_;
  std::vector<size_t> next_;
  std::vector<int> step_;
  std::vector<char> posted_, issued_, arrived_;
  bool at_once_ = false;
  bool await_first_ = false;
};

enum class Habit { kAsPlanned, kAwaitFirst, kAtOnce };

// Runs every rank to its end, picking at random who moves next; some ranks and the network may be a
// hundred times slower than others. False if they wait for each other.
bool finishes(const OverlapOrder& order, const SendPlan& plan, std::mt19937& random,
              Habit habit = Habit::kAsPlanned) {
  Ranks ranks(order, plan);
  if (habit == Habit::kAtOnce) ranks.await_at_once();
  if (habit == Habit::kAwaitFirst) ranks.await_first();
  std::vector<uint32_t> speed;
  for (size_t i = 0; i <= plan.at.size(); ++i) speed.push_back(random() % 2 == 0 ? 1 : 100);
  size_t left = plan.at.size();
  while (left > 0) {
    // At most so many refusals in a row before everything is tried.
    bool moved = false;
    for (int tries = 0; tries < 4 && !moved; ++tries) {
      const size_t who = random() % speed.size();
      if (random() % 100 >= speed[who]) continue;
      if (who == plan.at.size()) {
        moved = !plan.messages.empty() && ranks.move(random() % plan.messages.size());
      } else if (!ranks.done(who)) {
        moved = ranks.advance(who);
        left -= ranks.done(who) ? 1 : 0;
      }
    }
    for (size_t r = 0; r < plan.at.size() && !moved; ++r) {
      if (ranks.done(r)) continue;
      moved = ranks.advance(r);
      left -= ranks.done(r) ? 1 : 0;
    }
    if (!moved && !ranks.move(0)) return false;
  }
  return true;
}

// Posts a receive where it is needed and awaits a send at once.
bool naive_finishes(const OverlapOrder& order, std::mt19937& random) {
  SendPlan plan = send_plan(order);
  for (auto& list : plan.at) {
    for (PassTraffic& at : list) {
      at.await_sent.clear();
      at.post = at.receive;
    }
  }
  return finishes(order, plan, random, Habit::kAtOnce);
}

void for_every_shape(const std::function<void(const OverlapOrder&, const std::string&)>& check,
                     int most_pp, int most_m) {
  for (PipelineKind kind : {PipelineKind::k1F1B, PipelineKind::kInterleaved, PipelineKind::kZbH1,
                            PipelineKind::kZbH2, PipelineKind::kZbV, PipelineKind::kVHalf,
                            PipelineKind::kDualPipe, PipelineKind::kDualPipeV}) {
    for (int pp = 1; pp <= most_pp; ++pp) {
      if (kind == PipelineKind::kDualPipe && pp % 2 != 0) continue;
      for (int m = 1; m <= most_m; ++m) {
        for (bool overlap : {false, true}) {
          if (overlap && kind == PipelineKind::kVHalf) continue;
          check(make_overlap_order(kind, pp, 2, m, overlap),
                std::string(pipeline_kind_name(kind)) + " pp " + std::to_string(pp) + " m " +
                    std::to_string(m) + (overlap ? " overlap" : ""));
        }
      }
    }
  }
}

TEST(SendPlan, NoSpeedsOfRanksAndLinksEverStopIt) {
  std::mt19937 random(20261130);
  for_every_shape(
      [&](const OverlapOrder& order, const std::string& name) {
        for (Habit habit : {Habit::kAsPlanned, Habit::kAwaitFirst}) {
          ASSERT_TRUE(finishes(order, send_plan(order), random, habit)) << name;
        }
      },
      8, 16);
}

TEST(SendPlan, AwaitingAtOnceStopsForEver) {
  std::mt19937 random(1);
  // Rank 0 awaits the send of 0F1 and never posts the receive of the gradient that rank 1 awaits.
  EXPECT_FALSE(naive_finishes(make_overlap_order(PipelineKind::k1F1B, 2, 1, 3, false), random));
  EXPECT_FALSE(naive_finishes(make_overlap_order(PipelineKind::k1F1B, 4, 1, 8), random));
  EXPECT_FALSE(naive_finishes(make_overlap_order(PipelineKind::kDualPipeV, 4, 2, 8), random));
}

// The adversary is the laziest run: no rank does a step that the sender's way to this pass does not
// need. There the receive is posted, and one pass earlier it would not be.
TEST(SendPlan, AwaitsAtTheFirstPassThatProvesTheReceivePosted) {
  for_every_shape(
      [](const OverlapOrder& order, const std::string& name) {
        const SendPlan plan = send_plan(order);
        for (size_t r = 0; r < plan.at.size(); ++r) {
          size_t previous = 0;
          for (size_t i = 0; i < plan.at[r].size(); i += order.fused[r][i] ? 2 : 1) {
            for (int n : plan.at[r][i].await_sent) {
              Ranks here(order, plan);
              here.reach(r, i);
              ASSERT_TRUE(here.posted(n)) << name << " rank " << r << " pass " << i;
              const auto& sent = plan.at[r][previous].send;
              if (std::find(sent.begin(), sent.end(), n) != sent.end()) continue;
              Ranks before(order, plan);
              before.reach(r, previous);
              ASSERT_FALSE(before.posted(n)) << name << " rank " << r << " pass " << i;
            }
            previous = i;
          }
        }
      },
      5, 9);
}

TEST(SendPlan, ChannelsKeepTheirOrder) {
  for_every_shape(
      [](const OverlapOrder& order, const std::string& name) {
        const SendPlan plan = send_plan(order);
        std::map<std::tuple<int, int, bool>, std::vector<int>> sent, posted;
        const auto channel = [&](int n) {
          const StageMessage& at = plan.messages[static_cast<size_t>(n)];
          return std::tuple(at.from_rank, at.to_rank, at.is_gradient());
        };
        for (const auto& list : plan.at) {
          for (const PassTraffic& at : list) {
            for (int n : at.send) sent[channel(n)].push_back(n);
            for (int n : at.post) posted[channel(n)].push_back(n);
          }
        }
        ASSERT_EQ(sent, posted) << name;
      },
      8, 16);
}

// Of two ranks and two micro-batches: rank 0 runs 0F0 0F1 0B0 0B1, rank 1 1F0 1B0 1F1 1B1.
//   1F0 has nothing before it and posts its own receive; 1F1's is posted before 1B0.
//   0B0's is posted before 0F1 (1B0 needs 1F0 and 0F0, not 0F1), 0B1's before 0B0 (1B1 needs 0F1).
//   0F0's send is proven posted at 0B0, which 1B0 and so 1F0 precede; at the same place 0F1's,
//   whose receive is posted before 1B0. The gradients of 1B0 and 1B1 are proven posted by nothing:
//   1F1's input tells of 0F1, before which 0B0's receive is posted; 1B1's send is left to the end.
TEST(SendPlan, OfTwoRanksByHand) {
  const SendPlan plan = send_plan(make_overlap_order(PipelineKind::k1F1B, 2, 1, 2, false));
  const auto find = [&](const PipelinePass& from) {
    for (size_t n = 0; n < plan.messages.size(); ++n) {
      if (plan.messages[n].from == from) return static_cast<int>(n);
    }
    return -1;
  };
  const int f0 = find({0, PassKind::kForward, 0});
  const int f1 = find({0, PassKind::kForward, 1});
  const int b0 = find({1, PassKind::kBackward, 0});
  const int b1 = find({1, PassKind::kBackward, 1});
  EXPECT_THAT(plan.at[1][0].post, ElementsAre(f0));
  EXPECT_THAT(plan.at[1][1].post, ElementsAre(f1));
  EXPECT_THAT(plan.at[1][2].receive, ElementsAre(f1));
  EXPECT_THAT(plan.at[0][1].post, ElementsAre(b0));
  EXPECT_THAT(plan.at[0][2].post, ElementsAre(b1));
  EXPECT_THAT(plan.at[0][2].await_sent, ElementsAre(f0, f1));
  EXPECT_THAT(plan.at[1][2].await_sent, ElementsAre(b0));
  EXPECT_THAT(plan.await_at_end[0], ElementsAre());
  EXPECT_THAT(plan.await_at_end[1], ElementsAre(b1));
  EXPECT_THAT(most_unawaited_sends(plan), ElementsAre(2, 1));
}

}  // namespace
}  // namespace bagualu
