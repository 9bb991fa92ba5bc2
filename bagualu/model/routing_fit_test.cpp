#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "bagualu/model/routing_log.h"
#include "bagualu/model/routing_source.h"
#include "bagualu/model/routing_stats.h"
#include "bagualu/model/routing_trace.h"

namespace bagualu {
namespace {

RoutingTrace trace_of(const RoutingShape& shape, int64_t iterations, const RoutingGroup& group) {
  const auto source = make_routing_source(shape);
  RoutingTrace trace;
  std::vector<int32_t> rows;
  for (int64_t i = 0; i < iterations; ++i) {
    source->rows(i, 0, group, &rows);
    const auto ranks = static_cast<size_t>(group.ranks);
    const auto layers = static_cast<size_t>(group.layers);
    for (size_t at = 0; at < rows.size(); ++at) {
      trace.records.push_back({static_cast<int32_t>(i), static_cast<int32_t>(at / ranks / layers),
                               static_cast<int32_t>(at / ranks % layers),
                               static_cast<int32_t>(at % ranks), rows[at]});
    }
  }
  return trace;
}

void expect_alike(const RoutingStats& a, const RoutingStats& b, double tolerance) {
  EXPECT_NEAR(a.iterations.mean, b.iterations.mean, tolerance * b.iterations.mean);
  EXPECT_NEAR(a.iterations.p50, b.iterations.p50, tolerance * b.iterations.p50);
  EXPECT_NEAR(a.iterations.p90, b.iterations.p90, tolerance * b.iterations.p90);
  EXPECT_NEAR(a.iterations.p99, b.iterations.p99, 3 * tolerance * b.iterations.p99);
  EXPECT_LE(a.iterations.largest, b.iterations.largest * 1.001);
  EXPECT_NEAR(a.autocorrelation[0].value(), b.autocorrelation[0].value(), 0.1);
  EXPECT_NEAR(a.per_microbatch.mean, b.per_microbatch.mean, 2 * tolerance * b.per_microbatch.mean);
  ASSERT_EQ(a.layers.size(), b.layers.size());
  for (size_t i = 0; i < a.layers.size(); ++i) {
    EXPECT_NEAR(a.layers[i].iterations.mean, b.layers[i].iterations.mean,
                2 * tolerance * b.layers[i].iterations.mean)
        << "layer " << i;
  }
}

TEST(FitRouting, FindsTheShapeThatMadeATrace) {
  RoutingShape shape;
  shape.autocorrelation = 0.4;
  shape.layer_profile = {0.97, 1, 0.98, 0.99};
  shape.layer_spread = 0.3;
  shape.rank_agreement = 0.6;
  shape.microbatch_spread = 0.06;
  const RoutingGroup group{4, 4, 8, 8192, 32768, 1};
  const RoutingTrace trace = trace_of(shape, 6000, group);
  RoutingShape fitted = fit_routing(trace);
  EXPECT_EQ(fitted.kind, "fitted");
  EXPECT_NEAR(fitted.calm_fraction, 0.971, 0.01);
  EXPECT_NEAR(fitted.largest, 2.6, 0.15);
  EXPECT_NEAR(fitted.autocorrelation, 0.4, 0.08);
  EXPECT_NEAR(fitted.rank_agreement, 0.6, 0.04);
  EXPECT_NEAR(fitted.microbatch_spread, 0.06, 0.006);
  EXPECT_NEAR(fitted.layer_spread, 0.3, 0.06);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(fitted.layer_profile[i], shape.layer_profile[i], 0.005) << i;
  }
  fitted.seed = 99;
  const RoutingStats again = routing_stats(trace_of(fitted, 6000, group));
  expect_alike(again, routing_stats(trace), 0.01);
}

TEST(FitRouting, RecordedTrainingRunIsMadeAgain) {
  const std::filesystem::path file(BAGUALU_SOURCE_DIR "/bench/data/routing_trace.csv");
  const RoutingTrace experts = read_routing_logs({file});
  const RoutingTrace trace = fold_experts(experts, 4, "trace", "ep");
  const RoutingStats recorded = routing_stats(trace);
  const RoutingShape fitted = fit_routing(trace);
  EXPECT_EQ(fitted.quantiles.size(), static_cast<size_t>(recorded.steps));
  EXPECT_DOUBLE_EQ(std::round(recorded.iterations.largest * 1e6) / 1e6, fitted.largest);
  // 512 iterations made of 32: their distribution is the recorded one.
  const RoutingStats made = routing_stats(trace_of(
      fitted, 512,
      {static_cast<int64_t>(recorded.layers.size()), recorded.microbatches, 4, 8192, 32768, 1}));
  EXPECT_NEAR(made.iterations.mean, recorded.iterations.mean, 0.03 * recorded.iterations.mean);
  EXPECT_NEAR(made.iterations.p50, recorded.iterations.p50, 0.03 * recorded.iterations.p50);
  EXPECT_NEAR(made.iterations.p90, recorded.iterations.p90, 0.05 * recorded.iterations.p90);
  EXPECT_LE(made.iterations.largest, recorded.iterations.largest + 1e-6);
  for (size_t i = 0; i < made.layers.size(); ++i) {
    EXPECT_NEAR(made.layers[i].iterations.mean, recorded.layers[i].iterations.mean,
                0.05 * recorded.layers[i].iterations.mean)
        << i;
  }
}

TEST(FitRouting, OneIterationIsRepeated) {
  RoutingTrace trace;
  trace.records = {{0, 0, 0, 0, 60}, {0, 0, 0, 1, 40}};
  const RoutingShape fitted = fit_routing(trace);
  EXPECT_EQ(fitted.quantiles, std::vector<double>{1.2});
  EXPECT_EQ(fitted.autocorrelation, 0);
  std::vector<int32_t> rows;
  make_routing_source(fitted)->rows(17, 0, {1, 1, 2, 50, 100, 1}, &rows);
  EXPECT_EQ(std::max(rows[0], rows[1]), 60);
}

}  // namespace
}  // namespace bagualu
