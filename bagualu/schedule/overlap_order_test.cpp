#include "bagualu/schedule/overlap_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <random>

#include "bagualu/base/error.h"
#include "bagualu/schedule/pipeline_text.h"

namespace bagualu {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr PipelineKind kOverlapped[] = {
    PipelineKind::k1F1B, PipelineKind::kInterleaved, PipelineKind::kZbH1,     PipelineKind::kZbH2,
    PipelineKind::kZbV,  PipelineKind::kDualPipe,    PipelineKind::kDualPipeV};

TEST(OverlapOrder, EveryShapeRunsToItsEnd) {
  for (PipelineKind kind : kOverlapped) {
    for (int pp = 1; pp <= 8; ++pp) {
      if (kind == PipelineKind::kDualPipe && pp % 2 != 0) continue;
      for (int per_rank = 1; per_rank <= (kind == PipelineKind::kInterleaved ? 4 : 1); ++per_rank) {
        for (int m = 1; m <= 20; ++m) {
          for (bool overlap : {false, true}) {
            const OverlapOrder order = make_overlap_order(kind, pp, per_rank, m, overlap);
            ASSERT_EQ(order_fault(order, kind), std::nullopt)
                << pipeline_kind_name(kind) << " pp " << pp << " v " << per_rank << " m " << m
                << "\n"
                << order_text(order);
          }
        }
      }
    }
  }
}

TEST(OverlapOrder, OneRankRunsAForwardAheadOfEveryBackward) {
  EXPECT_EQ(order_text(make_overlap_order(PipelineKind::k1F1B, 1, 1, 3)),
            "0F0 [0F1|0B0] [0F2|0B1] 0B2\n");
  EXPECT_EQ(order_text(make_overlap_order(PipelineKind::k1F1B, 1, 1, 1)), "0F0 0B0\n");
}

TEST(OverlapOrder, WarmUpHasASlotPerRankThereAndBack) {
  EXPECT_EQ(order_text(make_overlap_order(PipelineKind::k1F1B, 2, 1, 5)),
            "0F0 0F1 0F2 [0F3|0B0] [0F4|0B1] 0B2 0B3 0B4\n"
            "1F0 [1F1|1B0] [1F2|1B1] [1F3|1B2] [1F4|1B3] 1B4\n");
}

// What jobs and make_order() refuse: 7 micro-batches on 4 ranks, the first group has 7, not 4
// and 3.
TEST(OverlapOrder, InterleavingTakesAnyNumberOfMicrobatches) {
  EXPECT_THROW(make_order(PipelineKind::kInterleaved, 4, 2, 7), InvalidInput);
  const OverlapOrder order = make_overlap_order(PipelineKind::kInterleaved, 4, 2, 7, false);
  EXPECT_EQ(order.order, interleaved(4, 2, 7, 7));
  EXPECT_EQ(make_overlap_order(PipelineKind::kInterleaved, 4, 2, 8, false).order,
            make_order(PipelineKind::kInterleaved, 4, 2, 8));
}

TEST(OverlapOrder, RefusesWhatHasNoSlots) {
  EXPECT_THROW(make_overlap_order(PipelineKind::kVHalf, 4, 2, 8), InvalidInput);
  EXPECT_THROW(make_overlap_order(PipelineKind::kDualPipe, 3, 1, 8), InvalidInput);
  EXPECT_THROW(make_overlap_order(PipelineKind::kInterleaved, 2, 1, 0), InvalidInput);
  EXPECT_EQ(make_overlap_order(PipelineKind::kVHalf, 4, 2, 8, false).order,
            make_order(PipelineKind::kVHalf, 4, 2, 8));
}

// One more than the forwards ahead while a slot runs: 2 (p - 1 - r) + 2.
TEST(OverlapOrder, HoldsTwoMicrobatchesPerRankBehind) {
  EXPECT_THAT(in_flight(make_overlap_order(PipelineKind::k1F1B, 4, 1, 16)),
              ElementsAre(8, 6, 4, 2));
}

SlotNs percent(int64_t share) {
  return [share](size_t, size_t, int64_t forward_ns, int64_t backward_ns) {
    return (forward_ns + backward_ns) * share / 100;
  };
}

// F = 100, B = 200, a slot 210. A rank works m - a slots with a = 2 (p - 1 - r) + 1, and a forwards
// and a backwards alone. The step is that of the last rank: p - 1 forwards come to it, it runs one
// forward, m - 1 slots and a backward, and p - 1 backwards follow:
//   4 * 100 + 15 * 210 + 4 * 200 = 4350, where 1F1B without slots takes (16 + 3) * 300 = 5700.
TEST(OverlapOrder, SlotsFollowEachOtherWithoutIdling) {
  const OverlapOrder order = make_overlap_order(PipelineKind::k1F1B, 4, 1, 16);
  const PipelineTimes times = equal_times(order.order, 100, 200);
  EXPECT_EQ(simulate(order, times, percent(70)).makespan_ns, 4350);
  const PipelineOrder plain = one_f_one_b(4, 16);
  EXPECT_EQ(simulate(plain, times).makespan_ns, 5700);
  // The usual warm-up with slots: neighbours take turns.
  OverlapOrder short_warm_up = without_slots(plain);
  for (size_t r = 0; r < 4; ++r) {
    auto& list = short_warm_up.order.ranks[r];
    for (size_t i = 3 - r + 1; i + 1 < list.size(); ++i) {
      const bool pair =
          list[i].kind == PassKind::kForward && list[i - 1].kind == PassKind::kBackward;
      if (!pair) continue;
      std::swap(list[i - 1], list[i]);
      short_warm_up.fused[r][i - 1] = true;
      ++i;
    }
  }
  ASSERT_EQ(order_fault(short_warm_up), std::nullopt) << order_text(short_warm_up);
  EXPECT_GT(simulate(short_warm_up, times, percent(70)).makespan_ns, 5700);
}

TEST(OverlapOrder, ASlotIsOneNode) {
  // 1F0 10-20; the slot [0F1|0B0] waits for 1B0 (20-40), 40-70 (10 + 20); 1F1 gets its input at its
  // end, not at 50.
  const OverlapOrder order = parse_overlap_order("0F0 [0F1|0B0] 0B1\n1F0 1B0 1F1 1B1", "text");
  const PipelineRun run = simulate(order, equal_times(order.order, 10, 20));
  EXPECT_THAT(run.start_ns[0], ElementsAre(0, 40, 40, 100));
  EXPECT_THAT(run.end_ns[0], ElementsAre(10, 70, 70, 120));
  EXPECT_EQ(run.start_ns[1][2], 70);
  // Busy 10 + 30 + 20 of 120.
  EXPECT_EQ(run.bubble_ns[0], 60);
  EXPECT_EQ(draw_order(order, run, 24),
            "0 F0......F1B0--......B1--\n"
            "1 ..F0B0--......F1B1--....\n");
  EXPECT_EQ(draw_order(order, run, 4), "0 .X.B\n1 F.F.\n");
}

TEST(OverlapOrder, SvgHasTwoHalvesPerSlot) {
  const OverlapOrder order = parse_overlap_order("0F0 [0F1|0B0] 0B1", "text");
  const std::string svg = draw_order_svg(order, simulate(order, equal_times(order.order, 10, 20)));
  EXPECT_THAT(svg, AllOf(HasSubstr("height=\"10\" fill=\"#4878a8\""),
                         HasSubstr("height=\"10\" fill=\"#d1843c\""),
                         HasSubstr("<title>0F1 10-40 ns</title>")));
}

TEST(OverlapOrder, TextReadsBack) {
  for (PipelineKind kind : kOverlapped) {
    const OverlapOrder order = make_overlap_order(kind, 4, 2, 8);
    EXPECT_EQ(parse_overlap_order(order_text(order), "text"), order);
  }
  const PipelineOrder plain = make_order(PipelineKind::kZbV, 3, 2, 5);
  EXPECT_EQ(parse_overlap_order(order_text(plain), "text"), without_slots(plain));
}

TEST(OverlapOrder, ParseErrorsNameLineAndToken) {
  for (const char* bad : {"[0F1]", "[0F1|]", "[|0B0]", "[0F1|0B0", "0F1|0B0]", "[0F1|0B0|0W0]",
                          "[0F1 0B0]", "[]", "[0F1/0B0]"}) {
    try {
      parse_overlap_order(std::string("0F0\n0F0 ") + bad, "text");
      ADD_FAILURE() << bad;
    } catch (const InvalidInput& error) {
      EXPECT_THAT(error.what(), HasSubstr("line 2, token 2")) << bad;
    }
  }
  EXPECT_THROW(parse_order("0F0 [0F1|0B0] 0B1", "text"), InvalidInput);
}

std::string fault_of(const char* text) {
  return order_fault(parse_overlap_order(text, "text")).value_or("none");
}

TEST(OverlapOrder, FaultsOfSlotsAreNamed) {
  EXPECT_EQ(fault_of("0F0 [0F1|0B0] 0B1"), "none");
  EXPECT_THAT(fault_of("[0F0|0B0]"), HasSubstr("rank 0: 0F0 and 0B0 are no slot"));
  EXPECT_THAT(fault_of("0F0 0F1 [0B0|0B1]"), HasSubstr("rank 0: 0B0 and 0B1 are no slot"));
  EXPECT_THAT(fault_of("0F0 [0B0|0F1] 0B1"), HasSubstr("are no slot"));
  EXPECT_THAT(fault_of("0F0 0F1 0I0 [0F2|0W0] 0I1 0W1 0I2 0W2"), HasSubstr("are no slot"));
  EXPECT_EQ(fault_of("[0F1|0B0] 0F0 0B1"), "for ever, rank 0: 0B0 waits for 0F0");
  // 0F1 leaves with the end of its slot, which waits for 1B0.
  EXPECT_EQ(fault_of("0F0 [0F1|0B0] 0B1\n1F0 1F1 1B0 1B1"),
            "for ever, rank 0: 0B0 waits for 1B0; rank 1: 1F1 waits for 0F1");
  EXPECT_EQ(order_fault(parse_order("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1", "text")), std::nullopt);
  OverlapOrder order = make_overlap_order(PipelineKind::k1F1B, 1, 1, 2);
  order.fused[0].back() = true;
  EXPECT_EQ(order_fault(order), "rank 0: 0B1 is fused with nothing");
}

// order_fault() and simulate() are separate code: on orders with two passes exchanged and slots put
// at random they must agree.
TEST(OverlapOrder, CheckAndSimulationAgree) {
  std::mt19937 random(11);
  int runs = 0;
  int stands = 0;
  for (int i = 0; i < 1500; ++i) {
    const PipelineKind kind = kOverlapped[random() % std::size(kOverlapped)];
    OverlapOrder order = without_slots(make_order(kind, 2, 2, 4));
    for (size_t r = 0; r < 2; ++r) {
      auto& list = order.order.ranks[r];
      std::swap(list[random() % list.size()], list[random() % list.size()]);
      for (size_t k = 0; k + 1 < list.size(); ++k) {
        const PassKind next = list[k + 1].kind;
        const bool backward = next == PassKind::kBackward || next == PassKind::kInputGrad;
        if (list[k].kind != PassKind::kForward || !backward || random() % 4 != 0) continue;
        if (list[k].microbatch == list[k + 1].microbatch) continue;
        order.fused[r][k++] = true;
      }
    }
    bool ran = true;
    try {
      simulate(order, equal_times(order.order, PassTimes{}));
    } catch (const InternalError&) {
      ran = false;
    }
    ASSERT_EQ(ran, !order_fault(order)) << order_text(order);
    ++(ran ? runs : stands);
  }
  EXPECT_GT(runs, 50);
  EXPECT_GT(stands, 50);
}

}  // namespace
}  // namespace bagualu
