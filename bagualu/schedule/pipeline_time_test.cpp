#include "bagualu/schedule/pipeline_time.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "bagualu/schedule/pipeline.h"

namespace bagualu {
namespace {

struct Case {
  int pp = 2;
  int per_rank = 1;
  int microbatches = 2;
  std::vector<StagePasses> stages;
};

double simulated_ns(PipelineKind kind, const Case& c) {
  PipelineTimes times;
  const size_t m = static_cast<size_t>(c.microbatches);
  for (const StagePasses& stage : c.stages) {
    times.forward_ns.emplace_back(m, std::lround(stage.forward_ns));
    times.backward_ns.emplace_back(m, std::lround(stage.backward_ns()));
    times.weight_grad_ns.emplace_back(m, std::lround(stage.weight_gradient_ns));
  }
  const PipelineOrder order = make_order(kind, c.pp, c.per_rank, c.microbatches);
  return static_cast<double>(simulate(order, times).makespan_ns);
}

/// Stages whose passes differ by up to `spread` from a random common size.
Case random_case(PipelineKind kind, double spread, std::mt19937& random) {
  Case c;
  c.pp = 2 << (random() % 4);
  c.microbatches = c.pp * (2 + static_cast<int>(random() % 6));
  if (is_v_shaped(kind)) c.per_rank = 2;
  if (kind == PipelineKind::kInterleaved) c.per_rank = 2 + static_cast<int>(random() % 3);
  const auto part = [&](double low, double high) {
    return low + (high - low) * static_cast<double>(random() % 1001) / 1000;
  };
  const double forward = part(1000, 1500);
  const double input = forward * part(0.9, 1.3);
  const double weight = forward * part(0.7, 1.0);
  for (int s = 0; s < c.pp * c.per_rank; ++s) {
    const double size = part(1 - spread, 1 + spread);
    c.stages.push_back(
        {std::round(forward * size), std::round(input * size), std::round(weight * size)});
  }
  return c;
}

struct Deviation {
  double mean = 0;
  double largest = 0;
};

Deviation deviation(PipelineKind kind, double spread) {
  constexpr int kCases = 60;
  std::mt19937 random(7);
  Deviation d;
  for (int i = 0; i < kCases; ++i) {
    const Case c = random_case(kind, spread, random);
    const double error =
        std::abs(pipeline_ns(kind, c.stages, c.pp, c.microbatches) / simulated_ns(kind, c) - 1);
    d.mean += error / kCases;
    d.largest = std::max(d.largest, error);
  }
  return d;
}

class EveryOrder : public testing::TestWithParam<PipelineKind> {};

TEST_P(EveryOrder, EqualStagesTakeWhatTheSimulationSays) {
  EXPECT_LT(deviation(GetParam(), 0).largest, 0.003);
}

TEST_P(EveryOrder, StagesThatDifferByATenthComeWithinAFewPerCent) {
  const Deviation d = deviation(GetParam(), 0.1);
  EXPECT_LT(d.mean, 0.02);
  EXPECT_LT(d.largest, 0.06);
}

INSTANTIATE_TEST_SUITE_P(Pipelines, EveryOrder,
                         testing::Values(PipelineKind::k1F1B, PipelineKind::kInterleaved,
                                         PipelineKind::kZbH1, PipelineKind::kZbH2,
                                         PipelineKind::kZbV, PipelineKind::kVHalf,
                                         PipelineKind::kDualPipe, PipelineKind::kDualPipeV),
                         [](const auto& info) {
                           std::string name(pipeline_kind_name(info.param));
                           std::erase(name, '-');
                           return name;
                         });

TEST(PipelineTime, OneForwardOneBackwardOfFourRanksTakesThirtyThree) {
  // (m + p - 1) * (F + B) = (8 + 3) * 3.
  const std::vector<StagePasses> stages(4, {1, 1, 1});
  EXPECT_DOUBLE_EQ(pipeline_ns(PipelineKind::k1F1B, stages, 4, 8), 33);
}

TEST(PipelineTime, SlowLastStageSetsThePaceOfOneForwardOneBackward) {
  // The last stage needs 8 * 4.5; before it 3 forwards of 1, behind it 3 backwards of 2.
  std::vector<StagePasses> stages(4, {1, 1, 1});
  stages[3] = {1.5, 1.5, 1.5};
  EXPECT_DOUBLE_EQ(pipeline_ns(PipelineKind::k1F1B, stages, 4, 8), 36 + 9);
}

}  // namespace
}  // namespace bagualu
