#include "bagualu/schedule/pipeline_figures.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::Ge;
using ::testing::Le;

constexpr PipelineKind kKinds[] = {PipelineKind::k1F1B,     PipelineKind::kInterleaved,
                                   PipelineKind::kZbH1,     PipelineKind::kZbH2,
                                   PipelineKind::kZbV,      PipelineKind::kVHalf,
                                   PipelineKind::kDualPipe, PipelineKind::kDualPipeV};

bool shape_allowed(PipelineKind kind, int pp, int v, int m) {
  try {
    check_order_shape(kind, pp, v, m, "test");
  } catch (const InvalidInput&) {
    return false;
  }
  return kind == PipelineKind::kInterleaved || v == 2;
}

int64_t longest(const std::vector<int64_t>& values) {
  return *std::max_element(values.begin(), values.end());
}

TEST(ClosedInFlight, EqualsTheOrders) {
  for (PipelineKind kind : kKinds) {
    if (kind == PipelineKind::kVHalf) continue;
    for (int pp = 1; pp <= 12; ++pp) {
      for (int v = 1; v <= 4; ++v) {
        for (int m = 1; m <= 40; ++m) {
          if (!shape_allowed(kind, pp, v, m)) continue;
          const std::vector<int> counts = in_flight(make_order(kind, pp, v, m));
          for (int r = 0; r < pp; ++r) {
            ASSERT_EQ(closed_in_flight(kind, pp, v, m, r), counts[static_cast<size_t>(r)])
                << pipeline_kind_name(kind) << " p " << pp << " v " << v << " m " << m << " rank "
                << r;
          }
        }
      }
    }
  }
}

TEST(ClosedMakespan, EqualsTheSimulation) {
  std::vector<PassTimes> all = {{1, 1, 1, 0}, {5, 5, 5, 0}, {10, 10, 10, 1}};
  for (int64_t input : {1, 4, 9, 10, 12, 15, 16, 20, 25, 31}) {
    for (int64_t weight : {1, 3, 7, 10, 14, 16, 19, 21, 30}) all.push_back({10, input, weight, 0});
  }
  int compared = 0;
  for (PipelineKind kind : kKinds) {
    for (const PassTimes& times : all) {
      for (int pp : {1, 2, 3, 4, 6, 7, 8, 12}) {
        for (int v = 1; v <= 3; ++v) {
          for (int m : {1, 2, 3, 4, 6, 7, 8, 12, 13, 14, 15, 16, 24, 28}) {
            if (!shape_allowed(kind, pp, v, m)) continue;
            const auto makespan = closed_makespan_ns(kind, pp, v, m, times);
            if (!makespan) continue;
            ++compared;
            const PipelineOrder order = make_order(kind, pp, v, m);
            const PipelineRun run = simulate(order, equal_times(order, times));
            ASSERT_EQ(*makespan, run.makespan_ns)
                << pipeline_kind_name(kind) << " p " << pp << " v " << v << " m " << m << " F "
                << times.forward_ns << " I " << times.input_grad_ns << " W "
                << times.weight_grad_ns;
            ASSERT_EQ(closed_span_ns(kind, pp, v, m, times), longest(run.span_ns))
                << pipeline_kind_name(kind) << " p " << pp << " v " << v << " m " << m << " F "
                << times.forward_ns << " I " << times.input_grad_ns << " W "
                << times.weight_grad_ns;
          }
        }
      }
    }
  }
  EXPECT_GT(compared, 5000);
}

// The published table (sail-sg/zero-bubble-pipeline-parallelism, README): bubbles under
// F = I = W relative to 1F1B's (p - 1)(F + I + W), and activations relative to 1F1B's p.
TEST(PublishedForms, ZeroBubbleTable) {
  OrderFiguresCache cache;
  for (int p : {2, 4, 8, 16}) {
    for (int m : {2 * p, 4 * p}) {
      const PassTimes stage = {2, 2, 2, 0};
      const PassTimes half = {1, 1, 1, 0};
      const int64_t work = 6 * m;
      const int64_t one = 6 * (p - 1);
      EXPECT_EQ(cache.of(PipelineKind::k1F1B, p, 1, m, stage).span_ns, work + one);
      const OrderFigures& h1 = cache.of(PipelineKind::kZbH1, p, 1, m, stage);
      EXPECT_EQ(h1.span_ns, work + one / 3);
      EXPECT_THAT(h1.in_flight, Each(p));
      const OrderFigures& h2 = cache.of(PipelineKind::kZbH2, p, 1, m, stage);
      EXPECT_EQ(h2.span_ns, work);
      EXPECT_THAT(h2.in_flight, Each(2 * p - 1));
      const OrderFigures& v = cache.of(PipelineKind::kZbV, p, 2, m, half);
      EXPECT_EQ(v.span_ns, work);
      EXPECT_THAT(v.in_flight, Each(2 * p));
      // V-Half: half of each, up to a constant.
      const OrderFigures& v_half = cache.of(PipelineKind::kVHalf, p, 2, m, half);
      EXPECT_THAT(v_half.span_ns - work, AllOf(Ge(one / 2), Le(one / 2 + p)));
      EXPECT_THAT(v_half.in_flight, Each(AllOf(Ge(p), Le(p + 2))));
    }
  }
}

// The published DualPipe table (deepseek-ai/DualPipe, README) gives (PP/2 - 1)(F&B + B - 3W) of
// bubble and PP + 1 activations. F&B is a forward and a backward that end together, F + B long at
// most: F + 2 B - 3 W = F + 2 I - W. One after the other, forward first, the forward's result
// leaves earlier, and the bubble is an I less per pair.
TEST(PublishedForms, DualPipeTable) {
  OrderFiguresCache cache;
  const PassTimes times = {10, 10, 8, 0};
  for (int p : {2, 4, 8, 16}) {
    const int64_t work = 28 * 4 * p;
    const OrderFigures& dual = cache.of(PipelineKind::kDualPipe, p, 1, 4 * p, times);
    EXPECT_EQ(dual.makespan_ns - work, (p / 2 - 1) * (10 + 2 * 10 - 8 - 10));
    EXPECT_THAT(dual.in_flight, Each(p + 1));
    const OrderFigures& v = cache.of(PipelineKind::kDualPipeV, p, 2, 4 * p, times);
    EXPECT_EQ(v.makespan_ns - 2 * work, (p - 1) * (10 + 2 * 10 - 8 - 10));
    EXPECT_THAT(v.in_flight, Each(2 * p + 1));
  }
}

TEST(OrderFiguresCache, TakesTheOrderWhereNoFormHolds) {
  OrderFiguresCache cache;
  const PassTimes times = {10, 12, 8, 3};
  const PipelineOrder order = make_order(PipelineKind::kVHalf, 4, 2, 6);
  const PipelineRun run = simulate(order, equal_times(order, times));
  const OrderFigures& figures = cache.of(PipelineKind::kVHalf, 4, 2, 6, times);
  EXPECT_EQ(figures.makespan_ns, run.makespan_ns);
  EXPECT_EQ(figures.in_flight, in_flight(order));
  EXPECT_DOUBLE_EQ(figures.bubble_fraction,
                   static_cast<double>(run.bubble_ns[0]) / static_cast<double>(run.makespan_ns));
  EXPECT_EQ(&cache.of(PipelineKind::kVHalf, 4, 2, 6, times), &figures);
  EXPECT_THROW(cache.of(PipelineKind::kDualPipe, 3, 1, 8, times), InvalidInput);
  EXPECT_THROW(cache.of(PipelineKind::kDualPipe, 3, 1, 8, times), InvalidInput);
}

}  // namespace
}  // namespace bagualu
