#include <gtest/gtest.h>

#include "bagualu/sim/engine_random_programs.h"

namespace bagualu {
namespace {

void expect_same(const SimMemberResult& fast, const SimMemberResult& slow) {
  EXPECT_EQ(fast.end_ns, slow.end_ns);
  EXPECT_EQ(fast.peak_bytes, slow.peak_bytes);
  EXPECT_EQ(fast.comm_wait_ns, slow.comm_wait_ns);
  EXPECT_EQ(fast.copy_wait_ns, slow.copy_wait_ns);
  for (int stream = 0; stream < kSimStreams; ++stream) {
    EXPECT_EQ(fast.busy_ns[stream], slow.busy_ns[stream]) << stream;
  }
}

TEST(SimEngineRandom, AgreesWithTheReferenceToTheNanosecondAndByte) {
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    SCOPED_TRACE(seed);
    const RandomReplica made = random_replica(seed);
    SimEngine engine(made.links);
    const SimReplicaResult fast = engine.run(made.groups);
    const auto slow = ReferenceEngine(made.links, made.groups).run();
    ASSERT_EQ(fast.by_member.size(), slow.size());
    int64_t sent_ns = 0, received_ns = 0;
    for (size_t i = 0; i < slow.size(); ++i) {
      expect_same(fast.by_member[i], slow[i]);
      sent_ns += fast.by_member[i].busy_ns[static_cast<size_t>(SimStream::kSend)];
      received_ns += fast.by_member[i].busy_ns[static_cast<size_t>(SimStream::kReceive)];
    }
    EXPECT_EQ(sent_ns, received_ns);  // what one sends another receives
    ASSERT_FALSE(testing::Test::HasFailure());
  }
}

TEST(SimEngineRandom, ALeftoverOfTheRunBeforeChangesNothing) {
  // One engine for replicas of other shapes in turn; links are those of the first.
  const SimLinks links = random_replica(0).links;
  SimEngine reused(links);
  for (uint64_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(seed);
    const RandomReplica made = random_replica(seed);
    const SimReplicaResult again = reused.run(made.groups),
                           fresh = SimEngine(links).run(made.groups);
    ASSERT_EQ(again.by_member.size(), fresh.by_member.size());
    for (size_t i = 0; i < fresh.by_member.size(); ++i) {
      expect_same(again.by_member[i], fresh.by_member[i]);
    }
    ASSERT_FALSE(testing::Test::HasFailure());
  }
}

struct Lanes {  // by stream: end of what ran there last
  int64_t end_ns[4] = {0, 0, 0, 0};
  int64_t busy_ns[kSimStreams] = {};
};

TEST(SimEngineRandom, NoRankRunsTwoThingsOnOneStream) {
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(seed);
    const RandomReplica made = random_replica(seed);
    const int members = static_cast<int>(made.groups.front().programs.size());
    std::vector<SimTrace> traces;
    for (int rank = 0; rank < static_cast<int>(made.groups.size()); ++rank) {
      for (int m = 0; m < members; ++m) traces.push_back({.pp_rank = rank, .member = m});
    }
    const SimReplicaResult result = SimEngine(made.links).run(made.groups, &traces);
    for (const SimTrace& trace : traces) {
      Lanes lanes;
      int64_t most = 0;
      for (const SimTraceEvent& event : trace.events) {
        const auto stream = static_cast<size_t>(event.stream);
        ASSERT_LE(event.start_ns, event.end_ns);
        if (stream < 4) {
          ASSERT_GE(event.start_ns, lanes.end_ns[stream]);
          lanes.end_ns[stream] = event.end_ns;
        }
        lanes.busy_ns[stream] += event.end_ns - event.start_ns;
        most = std::max(most, event.peak_bytes);
      }
      const auto& member =
          result.by_member[static_cast<size_t>(trace.pp_rank * members + trace.member)];
      // What is drawn is what was counted; bytes of awaits behind the last event are not drawn.
      for (size_t i = 0; i < kSimStreams; ++i) ASSERT_EQ(lanes.busy_ns[i], member.busy_ns[i]);
      ASSERT_LE(most, member.peak_bytes);
      // Lower bounds: no stream's load takes longer than the replica.
      for (size_t i = 0; i < 4; ++i) ASSERT_LE(member.busy_ns[i], member.end_ns);
      ASSERT_LE(member.busy_ns[0] + member.comm_wait_ns + member.copy_wait_ns, member.end_ns);
      ASSERT_LE(member.end_ns, result.end_ns);
    }
  }
}

TEST(SimEngineRandom, AFasterLinkNeverSlows) {
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(seed);
    const RandomReplica made = random_replica(seed);
    const int64_t before = SimEngine(made.links).run(made.groups).end_ns;
    for (double SimLinks::*rate :
         {&SimLinks::node_bytes_per_s, &SimLinks::network_bytes_per_s,
          &SimLinks::message_bytes_per_s, &SimLinks::d2h_bytes_per_s, &SimLinks::h2d_bytes_per_s}) {
      SimLinks faster = made.links;
      faster.*rate *= 2;
      ASSERT_LE(SimEngine(faster).run(made.groups).end_ns, before);
    }
  }
}

}  // namespace
}  // namespace bagualu
