#include "bagualu/schedule/pipeline_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

using ::testing::HasSubstr;

constexpr PipelineKind kKinds[] = {PipelineKind::k1F1B,     PipelineKind::kInterleaved,
                                   PipelineKind::kZbH1,     PipelineKind::kZbH2,
                                   PipelineKind::kZbV,      PipelineKind::kVHalf,
                                   PipelineKind::kDualPipe, PipelineKind::kDualPipeV};

std::string parse_error(std::string_view text) {
  try {
    parse_order(text, "order.txt");
  } catch (const InvalidInput& error) {
    return error.what();
  }
  return "no error";
}

std::string fault_of(std::string_view text) {
  return order_fault(parse_order(text, "order.txt")).value_or("none");
}

TEST(OrderText, EveryKindRunsAtEveryCountAndReadsBack) {
  for (PipelineKind kind : kKinds) {
    for (int pp = 1; pp <= 9; ++pp) {
      if (kind == PipelineKind::kDualPipe && pp % 2 == 1) continue;
      for (int m = 1; m <= 24; ++m) {
        for (int v = 1; v <= (kind == PipelineKind::kInterleaved ? 4 : 1); ++v) {
          if (kind == PipelineKind::kInterleaved && v > 1 && m > pp && m % pp != 0) continue;
          const PipelineOrder order = make_order(kind, pp, v, m);
          ASSERT_EQ(order_fault(order, kind), std::nullopt)
              << pipeline_kind_name(kind) << " p " << pp << " v " << v << " m " << m;
          const std::string text = order_text(order);
          const PipelineOrder back = parse_order(text, "text");
          ASSERT_EQ(back, order);
          ASSERT_EQ(order_text(back), text);
        }
      }
    }
  }
}

TEST(OrderText, InterleavedGroupsLargerThanTheRanksRun) {
  for (int group = 3; group <= 8; ++group) {
    for (int m = 1; m <= 17; ++m) {
      const int last = m % group;
      if (m > group && last > 0 && last < 3) {
        EXPECT_THROW(interleaved(3, 2, m, group), InternalError) << group << " " << m;
        continue;
      }
      const PipelineOrder order = interleaved(3, 2, m, group);
      ASSERT_EQ(order_fault(order, PipelineKind::kInterleaved), std::nullopt) << group << " " << m;
    }
  }
}

TEST(OrderText, ParseErrorsNameLineAndToken) {
  EXPECT_THAT(parse_error("0F0 0B0\n1F0 1X0\n"), HasSubstr("line 2, token 2: found 1X0"));
  for (const char* bad : {"F0", "0F", "0", "0F-1", "-1F0", "0F00", "01F0", "0F0x", "0f0", "0F0\t",
                          "0F99999999999", "9999999F0", "+1F0"}) {
    EXPECT_THAT(parse_error(std::string("0F0  ") + bad), HasSubstr("line 1, token 2")) << bad;
  }
  EXPECT_THAT(parse_error(""), HasSubstr("nothing"));
  EXPECT_THAT(parse_error("\n\n"), HasSubstr("nothing"));
}

TEST(OrderFault, NamesWhatIsMissingTwiceOrElsewhere) {
  EXPECT_EQ(fault_of("0F0 0B0"), "none");
  EXPECT_EQ(fault_of("0F0 0I0 0W0"), "none");
  EXPECT_EQ(fault_of("0F0"), "rank 0: 0B0 is missing");
  EXPECT_EQ(fault_of("0B0"), "0F0 is missing");
  EXPECT_EQ(fault_of("0F0 0I0"), "rank 0: 0W0 is missing");
  EXPECT_EQ(fault_of("0F0 0W0"), "rank 0: 0I0 is missing");
  EXPECT_EQ(fault_of("0F0 0B0 0I0 0W0"), "rank 0: 0B0 runs backward both whole and split");
  EXPECT_EQ(fault_of("0F0 0F0 0B0"), "rank 0: 0F0 is listed twice");
  EXPECT_EQ(fault_of("0F0\n0B0"),
            "rank 1: 0B0 stands on another rank than the passes before it, on rank 0");
  // A number far outside costs no memory.
  EXPECT_EQ(fault_of("1000000F1000000"), "0F0 is missing");
  PipelineOrder order = one_f_one_b(2, 2);
  order.microbatches = 1;
  EXPECT_THAT(order_fault(order).value_or("none"), HasSubstr("outside 2 stages and 1"));
}

TEST(OrderFault, NamesThePassesThatWaitForEachOther) {
  EXPECT_EQ(fault_of("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"),
            "for ever, rank 0: 0B0 waits for 1B0; rank 1: 1F1 waits for 0F1");
  EXPECT_EQ(fault_of("0F0 0W0 0I0"), "for ever, rank 0: 0W0 waits for 0I0");
  EXPECT_EQ(fault_of("0B0 0F0"), "for ever, rank 0: 0B0 waits for 0F0");
}

TEST(OrderFault, AsksForThePlaceOfTheKind) {
  const PipelineOrder order = make_order(PipelineKind::kZbV, 2, 1, 2);
  EXPECT_EQ(order_fault(order, PipelineKind::kInterleaved).value_or("none"),
            "rank 0: 3F0 belongs on rank 1");
  // The second half of DualPipe's micro-batches enters at the last rank.
  EXPECT_EQ(rank_of_pass(PipelineKind::kDualPipe, 4, 8, {0, PassKind::kForward, 3}), 0);
  EXPECT_EQ(rank_of_pass(PipelineKind::kDualPipe, 4, 8, {0, PassKind::kForward, 4}), 3);
}

// simulate() and order_fault() are separate code: on orders with two passes of one rank exchanged
// they must agree about which can run.
TEST(OrderFault, AgreesWithTheSimulation) {
  std::mt19937 random(5);
  int runs = 0;
  int stands = 0;
  for (int i = 0; i < 600; ++i) {
    const PipelineKind kind = kKinds[random() % std::size(kKinds)];
    PipelineOrder order = make_order(kind, 2, 2, 4);
    auto& list = order.ranks[random() % 2];
    std::swap(list[random() % list.size()], list[random() % list.size()]);
    bool ran = true;
    try {
      simulate(order, equal_times(order, PassTimes{}));
    } catch (const InternalError&) {
      ran = false;
    }
    ASSERT_EQ(ran, !order_fault(order)) << order_text(order);
    ++(ran ? runs : stands);
  }
  EXPECT_GT(runs, 100);
  EXPECT_GT(stands, 100);
}

TEST(OrderFault, KnowsRecomputeAndCopies) {
  EXPECT_EQ(fault_of("0F0 0O0 0L0 0R0 0B0"), "none");
  EXPECT_EQ(fault_of("0F0 0R0 0I0 0W0"), "none");
  EXPECT_EQ(fault_of("0F0 0O0 0B0"), "rank 0: 0L0 is missing");
  EXPECT_EQ(fault_of("0F0 0L0 0B0"), "rank 0: 0O0 is missing");
  EXPECT_EQ(fault_of("0F0 0B0 0R0"), "for ever, rank 0: 0B0 waits for 0R0");
  EXPECT_EQ(fault_of("0R0 0F0 0B0"), "for ever, rank 0: 0R0 waits for 0F0");
  EXPECT_EQ(fault_of("0O0 0F0 0L0 0B0"), "for ever, rank 0: 0O0 waits for 0F0");
  EXPECT_EQ(fault_of("0F0 0L0 0O0 0B0"), "for ever, rank 0: 0L0 waits for 0O0");
  EXPECT_EQ(fault_of("0F0 0O0 0I0 0L0 0W0"), "for ever, rank 0: 0I0 waits for 0L0");
}

// 0F0 0-10, 0O0 10-25 beside 0F1 10-20, 0O1 behind it 25-40, 0L0 25-45 beside it, 0R1 20-30;
// 0B0 waits for 0L0: 45-65. 0L1 is issued at 30 and runs behind 0L0, 45-65; 0B1 65-85.
TEST(DrawOrder, CopiesHaveRowsOfTheirOwn) {
  const PipelineOrder order = parse_order("0F0 0O0 0F1 0O1 0L0 0R1 0L1 0B0 0B1", "text");
  ASSERT_EQ(order_fault(order), std::nullopt);
  PipelineTimes times = equal_times(order, 10, 20);
  times.recompute_ns = {{10, 10}};
  times.offload_ns = {{15, 15}};
  times.reload_ns = {{20, 20}};
  const PipelineRun run = simulate(order, times);
  EXPECT_EQ(run.start_ns[0], (std::vector<int64_t>{0, 10, 10, 25, 25, 20, 45, 45, 65}));
  EXPECT_EQ(run.makespan_ns, 85);
  EXPECT_EQ(run.bubble_ns[0], 15);  // compute 10 + 10 + 10 + 20 + 20
  EXPECT_EQ(draw_order(order, run, 17),
            "0 F0F1R1...B0--B1--\n"
            "  ..O0-O1-.........\n"
            "  .....L0--L1--....\n");
  const std::string svg = draw_order_svg(order, run);
  EXPECT_THAT(svg, HasSubstr(">copies</text>"));
  EXPECT_THAT(svg, HasSubstr("<title>0L1 45-65 ns</title>"));
  // A reload of 5 more is waited for; an offload may take 0 more, since 0L0 waits for it.
  EXPECT_EQ(exposed_ns(order, times, {{{0, PassKind::kReload, 0}, 5}}), 5);
  EXPECT_EQ(slack(order, times)[0][1], 0);
}

TEST(PipelinePasses, CountsOfActivationsRefuseCopies) {
  const PipelineOrder order = parse_order("0F0 0O0 0L0 0B0", "text");
  EXPECT_THROW(in_flight(order), InternalError);
  EXPECT_THROW(resident_peaks(order, {{1}}), InternalError);
  EXPECT_THROW(simulate(order, equal_times(order, 1, 2)), InternalError);  // no times for them
}

TEST(DrawOrder, OneRowPerRankToScale) {
  const PipelineOrder order = one_f_one_b(2, 2);
  // 0F0 0-10, 0F1 10-20, 0B0 40-60, 0B1 70-90; 1F0 10-20, 1B0 20-40, 1F1 40-50, 1B1 50-70.
  const PipelineRun run = simulate(order, equal_times(order, 10, 20));
  EXPECT_EQ(draw_order(order, run, 18),
            "0 F0F1....B0--..B1--\n"
            "1 ..F0B0--F1B1--....\n");
  EXPECT_EQ(draw_order(order, run, 9),
            "0 FF..B0.B1\n"
            "1 .FB0FB1..\n");
}

TEST(DrawOrder, HigherStagesOfARankAreLowerCase) {
  const PipelineOrder order = parse_order("0F0 1F0 1I0 0I0 1W0 0W0", "text");
  const PipelineRun run = simulate(order, equal_times(order, PassTimes{}));
  EXPECT_EQ(draw_order(order, run, 12), "0 F0f0i0I0w0W0\n");
}

TEST(DrawOrder, SvgHasARectanglePerPass) {
  const PipelineOrder order = make_order(PipelineKind::kZbV, 4, 2, 8);
  const std::string svg = draw_order_svg(order, simulate(order, equal_times(order, PassTimes{})));
  size_t titles = 0;
  for (size_t at = svg.find("<title>"); at != std::string::npos; at = svg.find("<title>", at + 1)) {
    ++titles;
  }
  EXPECT_EQ(titles, 4U * 8 * 2 * 3);
  EXPECT_THAT(svg, HasSubstr("<title>7I0 "));
}

}  // namespace
}  // namespace bagualu
