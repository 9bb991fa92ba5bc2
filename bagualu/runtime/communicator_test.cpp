#include "bagualu/runtime/communicator.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>

#include "bagualu/base/error.h"
#include "bagualu/runtime/clock.h"
#include "bagualu/runtime/deadline.h"
#include "bagualu/runtime/loopback_group.h"
#include "bagualu/runtime/overlap_rig.h"

namespace bagualu {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kMs = 1'000'000;

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

// `bytes` of `value`.
at::Tensor filled(int64_t bytes, int value) {
  return at::full({bytes}, value, at::TensorOptions(at::kByte));
}

// Every rank sends `row_bytes` to each peer.
ops::WireLayout even_layout(int64_t size, int64_t row_bytes) {
  return ops::WireLayout(std::vector<int64_t>(size, 1), row_bytes, false);
}

TEST(Communicator, AGroupOfOneAgreesWithItselfAndCopiesCounts) {
  Communicator alone("", 0, 1);
  EXPECT_EQ(alone.all_reduce_min(7), 7);
  EXPECT_EQ(alone.all_gather({1, 2}), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(alone.take_busy_ns(), 0);
}

TEST(Communicator, TheVoteIsTheLeastOfAllRanks) {
  LoopbackGroup group("vote", 3);
  on_every_rank(3, [&](int64_t rank) {
    Communicator ranks(group.name_of(rank), rank, 3);
    EXPECT_EQ(ranks.all_reduce_min(10 - rank), 8);
    EXPECT_EQ(ranks.all_reduce_min(rank), 0);
  });
}

TEST(Communicator, PendingAllToAllsEndInAnyOrderOfWaiting) {
  LoopbackGroup group("order", 2);
  on_every_rank(2, [&](int64_t rank) {
    Communicator ranks(group.name_of(rank), rank, 2);
    const ops::WireLayout layout = even_layout(2, 64);
    std::vector<at::Tensor> sent, received;
    std::vector<PendingComm> pending;
    for (int i = 0; i < 4; ++i) {
      sent.push_back(filled(128, static_cast<int>(10 * i + rank)));
      received.push_back(filled(128, 0));
      pending.push_back(
          ranks.issue_all_to_all(sent[i], layout, received[i], layout, "x" + std::to_string(i)));
    }
    for (int i : {2, 0, 3, 1}) {
      pending[i].wait();
      EXPECT_FALSE(pending[i].pending());
      EXPECT_EQ(received[i][0].item<int>(), 10 * i);
      EXPECT_EQ(received[i][127].item<int>(), 10 * i + 1);
      EXPECT_GE(pending[i].times().done_ns, pending[i].times().issued_ns);
      EXPECT_EQ(pending[i].times().size_bytes, 64);  // the other half stays here
    }
  });
}

TEST(Communicator, AReceiveBufferIsNotReadBeforeItsEnd) {
  LoopbackGroup group("poison", 2);
  on_every_rank(2, [&](int64_t rank) {
    Communicator ranks(group.name_of(rank), rank, 2);
    at::Tensor out = filled(8, 1), in = filled(8, 2);
    group.stall(true);
    PendingComm pending =
        ranks.issue_all_to_all(out, even_layout(2, 4), in, even_layout(2, 4), "x");
    // The fake proves it: what is there before the end is neither the old nor the new value.
    EXPECT_EQ(in[0].item<int>(), 0xCD);
    EXPECT_FALSE(pending.query());
    group.stall(false);
    pending.wait();
    EXPECT_TRUE(pending.query());
    EXPECT_EQ(in[0].item<int>(), 1);
  });
}

TEST(Communicator, SendsMeetReceivesByTag) {
  LoopbackGroup group("tags", 2);
  on_every_rank(2, [&](int64_t rank) {
    Communicator ranks(group.name_of(rank), rank, 2);
    at::Tensor first = filled(16, rank == 0 ? 1 : 0), second = filled(16, rank == 0 ? 2 : 0);
    PendingComm a, b;
    if (rank == 0) {
      a = ranks.issue_send(first, 1, 1, "first");
      b = ranks.issue_send(second, 1, 2, "second");
    } else {  // the other way round
      b = ranks.issue_recv(second, 0, 2, "second");
      a = ranks.issue_recv(first, 0, 1, "first");
    }
    a.wait();
    b.wait();
    EXPECT_EQ(first[15].item<int>(), 1);
    EXPECT_EQ(second[15].item<int>(), 2);
  });
}

TEST(Communicator, ARankMeetsItselfByTagInEitherOrder) {
  Communicator alone("", 0, 1);
  at::Tensor out = filled(16, 3), in = filled(16, 0), early = filled(16, 0);
  PendingComm recv = alone.issue_recv(early, 0, 4, "posted early");
  PendingComm first = alone.issue_send(out, 0, 5, "x");
  EXPECT_FALSE(first.query());
  EXPECT_THROW(first.wait(), InternalError);  // nobody else can issue its other half
  PendingComm second = alone.issue_recv(in, 0, 5, "x");
  first.wait();
  second.wait();
  EXPECT_EQ(in[15].item<int>(), 3);
  EXPECT_FALSE(recv.query());
  recv.abandon();
  PendingComm send = alone.issue_send(out, 0, 4, "after a withdrawn receive");
  EXPECT_FALSE(send.query());
  EXPECT_EQ(early[0].item<int>(), 0);
}

TEST(Communicator, ADeadlineNamesActionGroupRanksAndTime) {
  LoopbackGroup group("late", 3);
  Communicator ranks(group.name_of(0), 0, 3,
                     {.name = "ep", .job_ranks = {4, 5, 6}, .deadline_ns = 20 * kMs});
  at::Tensor out = filled(12, 1), in = filled(12, 0);
  PendingComm pending =
      ranks.issue_all_to_all(out, even_layout(3, 4), in, even_layout(3, 4), "layer2.dispatch");
  const int64_t begin = steady_now_ns();
  try {
    pending.wait();
    ADD_FAILURE() << "no deadline";
  } catch (const DeadlineExceeded& error) {
    EXPECT_STREQ(error.what(),
                 "all-to-all of layer2.dispatch, group ep, with ranks 5, 6 did not end within "
                 "20 ms");
  }
  EXPECT_GE(steady_now_ns() - begin, 20 * kMs);
  EXPECT_GE(ranks.take_busy_ns(), 20 * kMs);
  EXPECT_TRUE(pending.pending());
  group.kill(1);  // else its end would be waited for
}

TEST(Communicator, ALostPeerIsNamedWithTheAction) {
  LoopbackGroup group("lost", 2);
  Communicator ranks(group.name_of(0), 0, 2, {.name = "pp", .job_ranks = {0, 8}});
  at::Tensor in = filled(8, 0);
  PendingComm pending = ranks.issue_recv(in, 1, 0, "micro-batch 3 from stage 1");
  group.kill(1);
  EXPECT_THAT(error_of([&] { pending.wait(); }),
              AllOf(HasSubstr("receive of micro-batch 3 from stage 1, group pp, with rank 8"),
                    HasSubstr("Connection closed by peer")));
  EXPECT_FALSE(pending.pending());
  EXPECT_THROW(ranks.all_reduce_min(1), PeerLost);
}

TEST(Communicator, AWithdrawnReceiveMakesItsGroupUnusable) {
  LoopbackGroup group("withdrawn", 2);
  Communicator ranks(group.name_of(0), 0, 2, {.name = "pp", .job_ranks = {}});
  at::Tensor in = filled(8, 0);
  PendingComm pending = ranks.issue_recv(in, 1, 0, "x");
  pending.abandon();
  EXPECT_FALSE(pending.pending());
  EXPECT_THAT(error_of([&] { ranks.issue_recv(in, 1, 0, "y"); }),
              HasSubstr("out of step since receive of x"));
}

TEST(Communicator, AnAbandonedCollectiveHasLetGoOfItsMemory) {
  LoopbackGroup group("abandoned", 2);
  on_every_rank(2, [&](int64_t rank) {
    Communicator ranks(group.name_of(rank), rank, 2);
    at::Tensor out = filled(8, 1), in = filled(8, 0);
    {
      PendingComm pending =
          ranks.issue_all_to_all(out, even_layout(2, 4), in, even_layout(2, 4), "x");
    }
    in.fill_(9);
    EXPECT_EQ(ranks.all_reduce_min(5), 5);  // the group goes on
    EXPECT_EQ(in[0].item<int>(), 9);
  });
  EXPECT_EQ(group.unended(), 0);
}

TEST(Communicator, ASlowLinkDelaysTheEndAndLeavesTheTimeToOthers) {
  LoopbackGroup group("slow", 2, {.max_delay_ns = 0});
  on_every_rank(2, [&](int64_t rank) {
    // 1,000 bytes to the peer at 10 kB/s are 100 ms, and 50 ms latency; the second one queues.
    Communicator ranks(
        group.name_of(rank), rank, 2,
        {.name = "ep", .job_ranks = {}, .link_bytes_per_s = 10'000, .link_latency_ns = 50 * kMs});
    at::Tensor out = filled(2000, 1), in = filled(2000, 0), in2 = filled(2000, 0);
    const ops::WireLayout layout = even_layout(2, 1000);
    PendingComm first = ranks.issue_all_to_all(out, layout, in, layout, "x");
    PendingComm second = ranks.issue_all_to_all(out, layout, in2, layout, "y");
    const int64_t issued = first.times().issued_ns;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(first.query());
    ranks.take_busy_ns();
    first.wait();
    const int64_t over = steady_now_ns() - issued;
    EXPECT_GE(over, 150 * kMs);
    EXPECT_LE(ranks.take_busy_ns(), over - 20 * kMs);  // what ran beside is not waited for
    second.wait();
    EXPECT_GE(steady_now_ns() - issued, 250 * kMs);
    EXPECT_GE(second.times().done_ns - issued, 250 * kMs);
    EXPECT_EQ(ranks.all_reduce_min(3), 3);  // votes and counts go as fast as they can
  });
}

TEST(Communicator, AnEmulatedDelayBeyondTheDeadlineIsNotSleptThrough) {
  LoopbackGroup group("too slow", 2, {.max_delay_ns = 0});
  on_every_rank(2, [&](int64_t rank) {
    // 1,000 bytes at 100 bytes/s are 10 s.
    Communicator ranks(
        group.name_of(rank), rank, 2,
        {.name = "ep", .job_ranks = {}, .deadline_ns = 50 * kMs, .link_bytes_per_s = 100});
    at::Tensor out = filled(2000, 1), in = filled(2000, 0);
    const ops::WireLayout layout = even_layout(2, 1000);
    PendingComm pending = ranks.issue_all_to_all(out, layout, in, layout, "x");
    const int64_t begin = steady_now_ns();
    EXPECT_THROW(pending.wait(), DeadlineExceeded);
    EXPECT_LT(steady_now_ns() - begin, 5'000 * kMs);
    EXPECT_TRUE(pending.pending());
  });
}

}  // namespace
}  // namespace bagualu
