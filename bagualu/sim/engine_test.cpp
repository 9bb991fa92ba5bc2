#include "bagualu/sim/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bagualu/base/error.h"
#include "bagualu/schedule/pipeline.h"
#include "bagualu/sim/engine_test_programs.h"

namespace bagualu {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(ExchangeNs, IsTheSlowestLinkOfTheSlowestMember) {
  SimLinks links;
  links.node_size = 2;
  links.node_bytes_per_s = 4e9;
  links.network_bytes_per_s = 1e9;
  links.latency_ns = 7;
  // Nodes {0, 1} and {2, 3}; everyone sends 25 rows in all. To member 0 go 40 / 4 = 10 rows from
  // each: 10 from its node, 20 from the other. Member 3 sends most between nodes: (40 + 30) / 4.
  const std::vector<int32_t> rows = {40, 30, 20, 10};
  // 20 rows of 100 bytes at 1 byte/ns = 2000; inside, 10 rows at 4 bytes/ns = 250.
  EXPECT_EQ(exchange_ns(links, 100, rows.data(), 4), 7 + 2000);
  links.network_bytes_per_s = 100e9;
  EXPECT_EQ(exchange_ns(links, 100, rows.data(), 4), 7 + 250);
  // Every second rank: nodes of one member, nothing inside. 30 rows at 100 bytes/ns.
  links.ranks_between = 2;
  EXPECT_EQ(exchange_ns(links, 100, rows.data(), 4), 7 + 30);
  // The group begins in the middle of a node: {0}, {1, 2}, {3}: member 0 has all 30 from outside.
  links.ranks_between = 1;
  links.first_member_in_node = 1;
  links.node_bytes_per_s = 1e15;
  EXPECT_EQ(exchange_ns(links, 100, rows.data(), 4), 7 + 30);
  EXPECT_EQ(exchange_ns(links, 100, rows.data(), 1), 0);
}

TEST(SimEngine, ExchangesStartWithTheLastMemberAndRowsDecideTimes) {
  ProgramWriter writer(1, 1);
  writer.compute(OpTime{{{0, 10}, {100, 110}}}, 0);  // 10 + rows
  writer.await(writer.exchange(0, 4)).compute(5);
  const std::vector<int32_t> rows = {30, 10};
  const SimGroup group{{&writer.program, &writer.program}, rows.data()};
  const auto result = SimEngine(plain_links()).run({group});
  // Issued at 40 and 20. Member 0 receives 30 / 2 rows of 4 bytes: 60 ns, until 100, then 5.
  EXPECT_EQ(result.end_ns, 105);
  EXPECT_EQ(result.by_member[0].comm_wait_ns, 60);
  EXPECT_EQ(result.by_member[1].comm_wait_ns, 80);
  EXPECT_EQ(result.by_member[1].busy_ns[0], 25);
  EXPECT_EQ(result.events, 2 * 3);
}

TEST(SimEngine, MessagesWaitForBothEndsMemberByMember) {
  ProgramWriter sender(1, 1), receiver;
  sender.compute(OpTime{{{0, 0}, {1, 1}}}, 0);  // as long as it has rows
  sender.message(0, true, 8);
  receiver.compute(20);
  receiver.await(receiver.message(0, false, 8));
  const std::vector<int32_t> rows = {10, 50};
  const SimGroup from{{&sender.program, &sender.program}, rows.data()};
  const SimGroup to{{&receiver.program, &receiver.program}};
  const auto result = SimEngine(plain_links()).run({from, to});
  EXPECT_EQ(result.by_member[2].end_ns, 28);  // sent at 10, posted at 20
  EXPECT_EQ(result.by_member[3].end_ns, 58);  // posted at 20, sent at 50
  EXPECT_EQ(result.by_member[3].comm_wait_ns, 38);
}

TEST(SimEngine, CopiesQueueInTheirDirection) {
  ProgramWriter writer;
  const int first = writer.copy(false, 100), second = writer.copy(false, 10);
  const int up = writer.copy(true, 30);
  writer.compute(5).await(up).await(second).await(first);
  const auto result = SimEngine(plain_links()).run({SimGroup{{&writer.program}}});
  // Up 0..30; down 0..100, 100..110. Awaited at 5, 30 and 110.
  EXPECT_EQ(result.end_ns, 110);
  EXPECT_EQ(result.by_member[0].copy_wait_ns, 25 + 80);
}

TEST(SimEngine, PeaksAreThoseOfTheMembersRowsAndRounded) {
  ProgramWriter writer(3, 1);
  writer.program.static_bytes = 1000;
  const SimBytes rows_kept{.formula = {.fixed = 1, .per_row = 10}, .cell = 0};
  SimBytes rows_freed = rows_kept;
  rows_freed.sign = -1;
  const SimBytes pieces{.formula = {.per_piece_row = 64}, .cell = 0};
  SimBytes pieces_freed = pieces;
  pieces_freed.sign = -1;
  const SimBytes tokens{.formula = {.per_token = 50}};  // 150 -> 192
  writer.compute(1, {rows_kept, pieces}, {pieces_freed});
  writer.compute(1, {tokens}, {rows_freed});
  const std::vector<int32_t> rows = {6, 7}, piece_rows = {1, 4};
  const SimGroup group{{&writer.program, &writer.program}, rows.data(), piece_rows.data()};
  const auto result = SimEngine(plain_links()).run({group});
  // Member 0: 61 -> 64, and 64 of its piece; then 64 + 192. Member 1: 71 -> 128; 128 + 256 first.
  EXPECT_EQ(result.by_member[0].peak_bytes, 1000 + 256);
  EXPECT_EQ(result.by_member[1].peak_bytes, 1000 + 384);
}

TEST(SimEngine, TracesShowIntervalsAndLiveBytes) {
  ProgramWriter writer;
  writer.program.static_bytes = 1;
  writer.compute(10, {fixed_bytes(64), fixed_bytes(640)}, {fixed_bytes(640, -1)});
  writer.await(writer.copy(false, 20), {}, {fixed_bytes(64, -1)});
  writer.compute(3);
  std::vector<SimTrace> traces(1);
  SimEngine(plain_links()).run({SimGroup{{&writer.program}}}, &traces);
  ASSERT_EQ(traces[0].events.size(), 3u);
  const SimTraceEvent &first = traces[0].events[0], &copy = traces[0].events[1],
                      &last = traces[0].events[2];
  EXPECT_EQ(first.live_bytes, 65);
  EXPECT_EQ(first.peak_bytes, 705);
  EXPECT_EQ(copy.stream, SimStream::kToHost);
  EXPECT_EQ(copy.start_ns, 10);
  EXPECT_EQ(copy.end_ns, 30);
  EXPECT_EQ(last.start_ns, 30);
  EXPECT_EQ(last.live_bytes, 1);
}

// Everything that one pass of an order needs; activations before gradients. A forward keeps 64
// bytes, or, by rows, 64 for each of its micro-batch.
std::vector<StepProgram> programs_of(const PipelineOrder& order, int64_t forward_ns,
                                     int64_t backward_ns, bool by_rows = false) {
  std::vector<StepProgram> programs;
  for (const auto& passes : order.ranks) {
    ProgramWriter writer;
    if (by_rows) writer.program.cells = order.microbatches;
    for (const PipelinePass& pass : passes) {
      const auto kept = [&](int sign) -> SimBytes {
        if (!by_rows) return fixed_bytes(64, sign);
        return {{.per_row = 64}, pass.microbatch, sign};
      };
      const bool forward = pass.kind == PassKind::kForward;
      // Message of the boundary below stage s: s * m + microbatch, gradients behind activations.
      const auto number = [&](int stage) {
        return (forward ? 0 : order.stages * order.microbatches) + stage * order.microbatches +
               pass.microbatch;
      };
      const int from = forward ? pass.stage - 1 : pass.stage + 1;
      if (from >= 0 && from < order.stages) {
        writer.await(writer.message(number(from), false, 0, !forward));
      }
      if (forward) {
        writer.compute(forward_ns, {kept(1)});
      } else {
        writer.compute(backward_ns, {}, {kept(-1)});
      }
      const int to = forward ? pass.stage + 1 : pass.stage - 1;
      if (to >= 0 && to < order.stages) writer.message(number(pass.stage), true, 0, !forward);
    }
    programs.push_back(writer.program);
  }
  return programs;
}

std::vector<SimGroup> groups_of(const std::vector<StepProgram>& programs, size_t members) {
  std::vector<SimGroup> groups;
  for (const StepProgram& program : programs) {
    groups.push_back({std::vector<const StepProgram*>(members, &program)});
  }
  return groups;
}

TEST(SimEngine, EqualStagesWithoutCommunicationHaveTheTextbookBubble) {
  for (const auto& [p, m] : {std::pair{1, 3}, {2, 2}, {4, 8}, {8, 8}, {16, 64}, {5, 7}}) {
    const auto programs = programs_of(one_f_one_b(p, m), 100, 200);
    const auto result = SimEngine(plain_links()).run(groups_of(programs, 3));
    // (m + p - 1) (f + b) in all, of which each rank computes m (f + b).
    EXPECT_EQ(result.end_ns, (m + p - 1) * 300);
    for (int rank = 0; rank < p; ++rank) {
      const auto& member = result.by_member[static_cast<size_t>(rank * 3)];
      const int64_t idle = result.end_ns - member.busy_ns[0];
      EXPECT_EQ(idle * (m + p - 1), result.end_ns * (p - 1));
      // Rank r holds at most p - r micro-batches.
      EXPECT_EQ(member.peak_bytes, 64 * std::min(m, p - rank));
    }
  }
}

/// Peaks over what one micro-batch of 10 rows keeps on a stage; `hot` ones have 25.
std::vector<double> peaks_in_units(const PipelineOrder& order, const std::vector<int>& hot) {
  const auto programs = programs_of(order, 100, 200, true);
  std::vector<int32_t> rows(static_cast<size_t>(order.microbatches), 10);
  for (const int microbatch : hot) rows[static_cast<size_t>(microbatch)] = 25;
  std::vector<SimGroup> groups = groups_of(programs, 1);
  for (SimGroup& group : groups) group.rows = rows.data();
  std::vector<double> peaks;
  for (const SimMemberResult& member : SimEngine(plain_links()).run(groups).by_member) {
    peaks.push_back(static_cast<double>(member.peak_bytes) / 640);
  }
  return peaks;
}

// Published numbers of activations in flight, and what a spike adds wherever it is among them.
TEST(SimEngine, SpikesStackOnTheActivationsInFlight) {
  using Peaks = std::vector<double>;
  EXPECT_EQ(peaks_in_units(one_f_one_b(4, 8), {}), (Peaks{4, 3, 2, 1}));
  EXPECT_EQ(peaks_in_units(one_f_one_b(8, 2), {}), (Peaks{2, 2, 2, 2, 2, 2, 2, 1}));
  EXPECT_EQ(peaks_in_units(one_f_one_b(1, 8), {}), (Peaks{1}));
  for (const int m : {8, 64}) {
    EXPECT_EQ(peaks_in_units(make_order(PipelineKind::kInterleaved, 4, 2, m), {}),
              (Peaks{11, 9, 7, 5}));  // chunks of half a stage
    EXPECT_EQ(peaks_in_units(one_f_one_b(4, m), {}), (Peaks{4, 3, 2, 1}));
  }
  EXPECT_EQ(peaks_in_units(one_f_one_b(4, 8), {2}), (Peaks{5.5, 4.5, 3.5, 2.5}));
  EXPECT_EQ(peaks_in_units(one_f_one_b(4, 8), {6}), (Peaks{5.5, 4.5, 3.5, 2.5}));
  EXPECT_EQ(peaks_in_units(one_f_one_b(4, 8), {2, 3}), (Peaks{7, 6, 5, 2.5}));
  EXPECT_EQ(peaks_in_units(one_f_one_b(4, 8), {0, 1, 2, 3}), (Peaks{10, 7.5, 5, 2.5}));
}

TEST(SimEngine, OrdersTakeAsLongAsThePipelineSimulationSays) {
  for (const PipelineKind kind : {PipelineKind::k1F1B, PipelineKind::kInterleaved}) {
    const PipelineOrder order = make_order(kind, 4, 2, 8);
    const auto expected = simulate(order, equal_times(order, 70, 130)).makespan_ns;
    EXPECT_EQ(SimEngine(plain_links()).run(groups_of(programs_of(order, 70, 130), 1)).end_ns,
              expected);
  }
}

TEST(SimEngine, ReturnsToStaticBytesAtTheEnd) {
  const auto programs = programs_of(one_f_one_b(4, 8), 100, 200);
  std::vector<SimTrace> traces;
  for (int rank = 0; rank < 4; ++rank) traces.push_back({.pp_rank = rank});
  SimEngine(plain_links()).run(groups_of(programs, 1), &traces);
  for (const SimTrace& trace : traces) EXPECT_EQ(trace.events.back().live_bytes, 0);
}

TEST(SimEngine, NamesRanksThatWaitForEachOther) {
  ProgramWriter first, second;
  first.program.names = second.program.names = {"there", "back"};
  // Each awaits the other's message before it sends its own.
  first.await(first.message(0, false, 0));
  first.message(1, true, 0);
  second.await(second.message(1, false, 0));
  second.message(0, true, 0);
  first.program.transfers[0].name = 1;
  const std::vector<SimGroup> groups = {SimGroup{{&first.program}}, SimGroup{{&second.program}}};
  EXPECT_THAT([&] { SimEngine(plain_links()).run(groups); },
              ThrowsMessage<InternalError>(
                  HasSubstr("pp rank 0 member 0 waits for message 0 (back), sent by 0 of 1")));
}

TEST(SimEngine, NamesTheExchangeThatAMemberNeverIssues) {
  ProgramWriter both(1, 1), none(1, 1);
  both.await(both.exchange(-1, 0));
  none.compute(1);
  const std::vector<int32_t> rows = {1, 1};
  const SimGroup group{{&both.program, &none.program}, rows.data()};
  EXPECT_THAT([&] { SimEngine(plain_links()).run({group}); },
              ThrowsMessage<InternalError>(HasSubstr("exchange 0 (unnamed), issued by 1 of 2")));
}

TEST(SimEngine, ADeathEndsTheReplica) {
  ProgramWriter dies, waits;
  dies.compute(30);
  dies.program.dies = true;
  waits.compute(10).await(waits.message(0, false, 0));
  waits.compute(1000);
  std::vector<SimTrace> traces(1, SimTrace{.pp_rank = 1});
  const auto result = SimEngine(plain_links())
                          .run({SimGroup{{&dies.program}}, SimGroup{{&waits.program}}}, &traces);
  EXPECT_TRUE(result.died);
  EXPECT_EQ(result.end_ns, 30);
  EXPECT_EQ(traces[0].events.size(), 1u);
}

TEST(SimEngine, RefusesMessagesWhoseEndsDisagree) {
  ProgramWriter sender, receiver;
  sender.message(0, true, 8);
  receiver.message(0, false, 9);
  const std::vector<SimGroup> groups = {SimGroup{{&sender.program}}, SimGroup{{&receiver.program}}};
  EXPECT_THAT([&] { SimEngine(plain_links()).run(groups); },
              ThrowsMessage<InternalError>(HasSubstr("ends of a message disagree")));
}

TEST(SimEngine, RefusesMessagesThatOvertakeEachOther) {
  ProgramWriter sender, receiver;
  sender.message(0, true, 8);
  sender.message(1, true, 8);
  receiver.message(1, false, 8);
  receiver.message(0, false, 8);
  const std::vector<SimGroup> groups = {SimGroup{{&sender.program}}, SimGroup{{&receiver.program}}};
  EXPECT_THAT([&] { SimEngine(plain_links()).run(groups); },
              ThrowsMessage<InternalError>(HasSubstr("overtake")));
}

TEST(StepCode, RefusesAnAwaitBeforeItsIssue) {
  ProgramWriter writer;
  writer.program.transfers.push_back({.kind = SimTransferKind::kToHost});
  writer.await(0);
  EXPECT_THROW(prepare(&writer.program), InternalError);
}

}  // namespace
}  // namespace bagualu
