#include "bagualu/schedule/pipeline_fit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "bagualu/schedule/pipeline_text.h"

namespace bagualu {
namespace {

using ::testing::Each;
using ::testing::Le;

int64_t longest(const std::vector<int64_t>& values) {
  return *std::max_element(values.begin(), values.end());
}

// Times of p unequal stages and of the 2 p halves that V-shaped orders have on the same ranks:
// rank r has the same work in both, split at random between its two virtual stages.
struct Instance {
  PipelineOrder plain;
  PipelineTimes plain_times;
  PipelineTimes halves_times;
};

using Draw = PassTimes (*)(std::mt19937&);

int64_t between(std::mt19937& random, int64_t least, int64_t most) {
  return least + static_cast<int64_t>(random() % static_cast<uint32_t>(most - least + 1));
}

// Of a transformer's stages: a forward may be four times another's, an input gradient is 0.8 to 1.6
// of its forward, a weight gradient 0.5 to 1.2 of it.
PassTimes stage_like(std::mt19937& random) {
  const int64_t forward = between(random, 50, 200);
  return {forward, forward * between(random, 8, 16) / 10, forward * between(random, 5, 12) / 10, 0};
}

PassTimes anything(std::mt19937& random) {
  return {between(random, 1, 20), between(random, 1, 20), between(random, 1, 20), 0};
}

Instance random_instance(int p, int m, Draw draw, std::mt19937& random) {
  Instance result;
  result.plain = one_f_one_b(p, m);
  result.plain_times = equal_times(result.plain, PassTimes{});
  PipelineOrder halves;
  halves.stages = 2 * p;
  halves.microbatches = m;
  result.halves_times = equal_times(halves, PassTimes{});
  for (int r = 0; r < p; ++r) {
    const auto at = static_cast<size_t>(r);
    PassTimes sum = {0, 0, 0, 0};
    for (int stage : {r, 2 * p - 1 - r}) {
      const PassTimes half = draw(random);
      const auto s = static_cast<size_t>(stage);
      const auto count = static_cast<size_t>(m);
      result.halves_times.forward_ns[s].assign(count, half.forward_ns);
      result.halves_times.backward_ns[s].assign(count, half.input_grad_ns + half.weight_grad_ns);
      result.halves_times.weight_grad_ns[s].assign(count, half.weight_grad_ns);
      sum.forward_ns += half.forward_ns;
      sum.input_grad_ns += half.input_grad_ns;
      sum.weight_grad_ns += half.weight_grad_ns;
    }
    const auto count = static_cast<size_t>(m);
    result.plain_times.forward_ns[at].assign(count, sum.forward_ns);
    result.plain_times.backward_ns[at].assign(count, sum.input_grad_ns + sum.weight_grad_ns);
    result.plain_times.weight_grad_ns[at].assign(count, sum.weight_grad_ns);
  }
  return result;
}

// Step of the fitted ZB-V relative to 1F1B's.
std::vector<double> zb_v_ratios(int count, Draw draw, std::mt19937& random) {
  std::vector<double> ratios;
  for (int i = 0; i < count; ++i) {
    const int p = 1 + static_cast<int>(random() % 6);
    const int m = 1 + static_cast<int>(random() % 12);
    const Instance at = random_instance(p, m, draw, random);
    const PipelineOrder fitted = fitted_order(PipelineKind::kZbV, p, 2, m, at.halves_times);
    EXPECT_EQ(order_fault(fitted, PipelineKind::kZbV), std::nullopt);
    // The promise of the kind: no more in flight than the order for equal times.
    EXPECT_THAT(in_flight(fitted), Each(Le(2 * p)));
    ratios.push_back(static_cast<double>(simulate(fitted, at.halves_times).makespan_ns) /
                     static_cast<double>(simulate(at.plain, at.plain_times).makespan_ns));
  }
  return ratios;
}

TEST(FittedOrder, ZbVIsNeverWorseThan1F1BOnUnequalStages) {
  std::mt19937 random(20261130);
  const std::vector<double> ratios = zb_v_ratios(1000, stage_like, random);
  EXPECT_LE(*std::max_element(ratios.begin(), ratios.end()), 1.0);
  EXPECT_LT(std::accumulate(ratios.begin(), ratios.end(), 0.0) / 1000, 0.9);
}

// Times no model has, such as a backward of twenty forwards on the last rank. 1F1B turns around
// there; a V's gradient comes back only after a trip to rank 0, and in 1F1B's memory rank 0 cannot
// always fill the time until then. Where that is so, least_v_step_ns() says that no order on a V
// could do better; the rest is never worse.
TEST(FittedOrder, ZbVIsNeverWorseThan1F1BOnAnyTimesUnlessItsMemoryForbidsBetter) {
  std::mt19937 random(20261130);
  int forbidden = 0;
  double sum = 0;
  for (int i = 0; i < 1600; ++i) {
    const int p = 1 + static_cast<int>(random() % 6);
    const int m = 1 + static_cast<int>(random() % 12);
    const Instance at = random_instance(p, m, anything, random);
    const PipelineOrder fitted = fitted_order(PipelineKind::kZbV, p, 2, m, at.halves_times);
    ASSERT_EQ(order_fault(fitted, PipelineKind::kZbV), std::nullopt);
    ASSERT_THAT(in_flight(fitted), Each(Le(2 * p)));
    const int64_t step = simulate(fitted, at.halves_times).makespan_ns;
    const int64_t plain = simulate(at.plain, at.plain_times).makespan_ns;
    const int64_t least = least_v_step_ns(p, m, at.halves_times);
    ASSERT_LE(least, step) << "p " << p << " m " << m << " case " << i;
    ASSERT_LE(step, std::max(plain, least)) << "p " << p << " m " << m << " case " << i;
    forbidden += step > plain ? 1 : 0;
    sum += static_cast<double>(step) / static_cast<double>(plain);
  }
  EXPECT_LE(forbidden, 2);
  EXPECT_LT(sum / 1600, 0.9);
}

PipelineTimes times_of(const std::vector<PassTimes>& stages, int m) {
  PipelineTimes times;
  for (const PassTimes& at : stages) {
    const auto count = static_cast<size_t>(m);
    times.forward_ns.emplace_back(count, at.forward_ns);
    times.backward_ns.emplace_back(count, at.input_grad_ns + at.weight_grad_ns);
    times.weight_grad_ns.emplace_back(count, at.weight_grad_ns);
  }
  return times;
}

// Two ranks, four micro-batches: stage 3's first forward comes after 3 + 19 + 10 = 32. Rank 0, with
// room for four, runs at most three forwards of stage 0 before it, 9. Its work is 4 (29 + 29) =
// 232, so that the step takes 232 + 32 - 9 = 255. 1F1B with the same work takes 252.
TEST(FittedOrder, MeetsTheBoundWhereMemoryForbids1F1BsStep) {
  const PipelineTimes times =
      times_of({{3, 19, 4, 0}, {19, 2, 3, 0}, {10, 4, 1, 0}, {19, 6, 7, 0}}, 4);
  EXPECT_EQ(least_v_step_ns(2, 4, times), 255);
  EXPECT_EQ(simulate(fitted_order(PipelineKind::kZbV, 2, 2, 4, times), times).makespan_ns, 255);
}

// Lists find 337; 1F1B with the same work takes 336.
TEST(FittedOrder, ExchangesPassesWhereListsAreNotEnough) {
  const PipelineTimes times = times_of(
      {{2, 19, 8, 0}, {16, 5, 1, 0}, {7, 4, 19, 0}, {14, 1, 6, 0}, {11, 7, 5, 0}, {20, 16, 6, 0}},
      4);
  const PipelineOrder fitted = fitted_order(PipelineKind::kZbV, 3, 2, 4, times);
  EXPECT_EQ(order_fault(fitted, PipelineKind::kZbV), std::nullopt);
  EXPECT_THAT(in_flight(fitted), Each(Le(6)));
  EXPECT_LE(simulate(fitted, times).makespan_ns, 336);
}

TEST(FittedOrder, ZeroBubbleStepsAreNeverWorseThan1F1B) {
  std::mt19937 random(7);
  for (int i = 0; i < 300; ++i) {
    const int p = 1 + static_cast<int>(random() % 6);
    const int m = 1 + static_cast<int>(random() % 12);
    const Instance at = random_instance(p, m, anything, random);
    const int64_t plain = simulate(at.plain, at.plain_times).makespan_ns;
    for (PipelineKind kind : {PipelineKind::kZbH1, PipelineKind::kZbH2}) {
      const PipelineOrder fitted = fitted_order(kind, p, 1, m, at.plain_times);
      ASSERT_EQ(order_fault(fitted, kind), std::nullopt);
      ASSERT_LE(simulate(fitted, at.plain_times).makespan_ns, plain)
          << pipeline_kind_name(kind) << " p " << p << " m " << m << " case " << i;
    }
  }
}

TEST(FittedOrder, LeavesEqualTimesAsTheyAre) {
  for (int p : {1, 2, 4, 7}) {
    const PipelineOrder order = make_order(PipelineKind::kZbV, p, 2, 3 * p);
    EXPECT_EQ(fitted_order(PipelineKind::kZbV, p, 2, 3 * p, equal_times(order, PassTimes{})),
              order);
  }
}

TEST(ZeroBubbleOrder, MeetsTheClosedFormsAtOnceAndTwiceTheMemoryOf1F1B) {
  for (int p : {2, 4, 8, 16}) {
    const int m = 4 * p;
    const PipelineTimes times = equal_times(one_f_one_b(p, m), PassTimes{});
    const PipelineOrder once = zero_bubble_order(p, m, times, {p, 1, 1});
    const PipelineOrder twice = zero_bubble_order(p, m, times, {2 * p, 1, 1});
    for (const PipelineOrder* order : {&once, &twice}) {
      ASSERT_EQ(order_fault(*order, PipelineKind::k1F1B), std::nullopt);
    }
    EXPECT_THAT(in_flight(once), Each(Le(p)));
    EXPECT_THAT(in_flight(twice), Each(Le(2 * p)));
    // Span: work 3 m, plus (p - 1)(F + I - W) = p - 1, and plus nothing.
    EXPECT_EQ(longest(simulate(once, times).span_ns), 3 * m + p - 1);
    EXPECT_EQ(longest(simulate(twice, times).span_ns), 3 * m);
  }
}

TEST(ZeroBubbleOrder, HoldsAnyLimit) {
  const PipelineTimes times = equal_times(one_f_one_b(4, 9), PassTimes{10, 13, 7, 2});
  int64_t last = 0;
  for (int limit = 1; limit <= 9; ++limit) {
    const PipelineOrder order = zero_bubble_order(4, 9, times, {limit, 1, 1});
    ASSERT_EQ(order_fault(order), std::nullopt) << limit;
    EXPECT_THAT(in_flight(order), Each(Le(limit)));
    const int64_t ns = longest(simulate(order, times).span_ns);
    last = ns;
  }
  EXPECT_LT(last, 9 * 30 + 60);  // work and less than two micro-batches' time
}

}  // namespace
}  // namespace bagualu
