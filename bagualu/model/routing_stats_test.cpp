#include "bagualu/model/routing_stats.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "bagualu/base/error.h"
#include "bagualu/model/routing_loads.h"

namespace bagualu {
namespace {

using testing::DoubleEq;
using testing::DoubleNear;
using testing::ElementsAre;
using testing::Optional;
using testing::Pair;

RoutingTrace trace_of(std::vector<RoutedRecord> records) {
  std::sort(records.begin(), records.end(), [](const RoutedRecord& a, const RoutedRecord& b) {
    return std::tie(a.step, a.microbatch, a.layer, a.rank) <
           std::tie(b.step, b.microbatch, b.layer, b.rank);
  });
  RoutingTrace trace;
  trace.records = std::move(records);
  return trace;
}

/// One layer, two ranks, one micro-batch a step: rank 0 gets factor * 500 of 1000 rows.
RoutingTrace trace_of_factors(const std::vector<double>& factors) {
  std::vector<RoutedRecord> records;
  for (size_t i = 0; i < factors.size(); ++i) {
    const auto hot = static_cast<int64_t>(std::lround(factors[i] * 500));
    records.push_back({static_cast<int32_t>(i), -1, 0, 0, hot});
    records.push_back({static_cast<int32_t>(i), -1, 0, 1, 1000 - hot});
  }
  return trace_of(std::move(records));
}

TEST(RoutingStats, ImbalanceIsTheHottestLayerWithRowsSummedOverMicrobatches) {
  // Layer 3: micro-batches 30/10 and 10/30, 40/40 in sum: 1.0. Layer 4: 24/16 and 26/14, 50/30 in
  // sum, mean 40: 1.25, on rank 0. By micro-batch: 30 / 20 = 1.5 twice, both in layer 3.
  const RoutingStats stats = routing_stats(trace_of({{5, 0, 3, 0, 30},
                                                     {5, 0, 3, 1, 10},
                                                     {5, 1, 3, 0, 10},
                                                     {5, 1, 3, 1, 30},
                                                     {5, 0, 4, 0, 24},
                                                     {5, 0, 4, 1, 16},
                                                     {5, 1, 4, 0, 26},
                                                     {5, 1, 4, 1, 14}}));
  ASSERT_EQ(stats.series.size(), 1U);
  EXPECT_DOUBLE_EQ(stats.series[0].factor, 1.25);
  EXPECT_EQ(stats.series[0].layer, 4);
  EXPECT_EQ(stats.series[0].rank, 0);
  EXPECT_EQ(stats.microbatches, 2);
  EXPECT_DOUBLE_EQ(stats.per_microbatch.largest, 1.5);
  EXPECT_DOUBLE_EQ(stats.per_microbatch.mean, 1.5);
  ASSERT_EQ(stats.layers.size(), 2U);
  EXPECT_DOUBLE_EQ(stats.layers[0].iterations.mean, 1.0);
  EXPECT_DOUBLE_EQ(stats.layers[1].hottest_fraction, 1.0);
  // Rank 0: 1.0 and 1.25; rank 1: 1.0 and 0.75. Of equals the lower rank is the hottest.
  EXPECT_DOUBLE_EQ(stats.ranks[0].mean, 1.125);
  EXPECT_DOUBLE_EQ(stats.ranks[1].largest, 1.0);
  EXPECT_DOUBLE_EQ(stats.ranks[0].hottest_fraction, 1.0);
}

TEST(RoutingStats, SharesCountWhatIsAboveTheMarksAndQuantilesAreNearestRank) {
  const FactorSummary s = summarise({2.0, 1.2, 2.7, 1.0});
  EXPECT_DOUBLE_EQ(s.p50, 1.2) << "second of four";
  EXPECT_DOUBLE_EQ(s.p99, 2.7);
  EXPECT_DOUBLE_EQ(s.mean, 1.725);
  EXPECT_THAT(s.above_fraction, ElementsAre(0.5, 0.25, 0.25)) << "equal is not above";
  EXPECT_EQ(summarise({}).count, 0);
}

TEST(RoutingStats, AutocorrelationIsTheUsualEstimate) {
  // 1, 1.5, 1, 1.5: mean 1.25, deviations -+0.25; lag 1: 3 products of -1/16 over 4 squares of 1/16
  const RoutingStats stats = routing_stats(trace_of_factors({1.0, 1.5, 1.0, 1.5}));
  EXPECT_THAT(stats.autocorrelation[0], Optional(DoubleEq(-0.75)));
  EXPECT_THAT(stats.autocorrelation[1], Optional(DoubleEq(0.5)));
  EXPECT_THAT(stats.autocorrelation[2], Optional(DoubleEq(-0.25)));
  EXPECT_FALSE(stats.autocorrelation[3].has_value()) << "no pair is 4 steps apart";
  EXPECT_FALSE(routing_stats(trace_of_factors({1.5, 1.5})).autocorrelation[0].has_value());
}

TEST(RoutingStats, PairsOfStepsAreCountedByTheirNumbers) {
  RoutingTrace trace = trace_of_factors({1.0, 1.5, 1.0});
  for (RoutedRecord& record : trace.records) record.step *= 2;
  const RoutingStats stats = routing_stats(trace);
  EXPECT_FALSE(stats.autocorrelation[0].has_value());
  EXPECT_TRUE(stats.autocorrelation[1].has_value());
}

TEST(RoutingStats, ACellWithoutAllItsRanksGivesNoFactor) {
  std::vector<RoutedRecord> records;
  for (int step = 0; step < 4; ++step) {
    records.push_back({step, 0, 0, 0, 60});
    if (step != 2) records.push_back({step, 0, 0, 3, 40});
  }
  const RoutingStats stats = routing_stats(trace_of(records));
  EXPECT_EQ(stats.steps, 3);
  EXPECT_EQ(stats.cells, 4);
  EXPECT_EQ(stats.incomplete_cells, 1);
  EXPECT_DOUBLE_EQ(stats.iterations.largest, 1.2) << "not 60 / 60";
  EXPECT_THAT(stats.absent_ranks, ElementsAre(1, 2));
  ASSERT_EQ(stats.ranks.size(), 2U);
  EXPECT_EQ(stats.ranks[1].missing, 1);
  // With the balanced rows known, a rank alone has a factor.
  const RoutingStats known = routing_stats(trace_of(records), {.balanced_rows = 40});
  EXPECT_EQ(known.steps, 4);
  EXPECT_DOUBLE_EQ(known.iterations.p50, 1.5);
}

TEST(RoutingStats, RanksThatComeAndGoInsideAStepNeverPushTheFactorBelowOne) {
  // Found by fuzzing. Each rank has rows in one of three micro-batches: the mean of the step is 40,
  // not 30 + 40 + 50.
  const RoutingStats stats =
      routing_stats(trace_of({{0, 0, 0, 0, 30}, {0, 1, 0, 1, 40}, {0, 2, 0, 2, 50}}));
  EXPECT_DOUBLE_EQ(stats.iterations.largest, 1.25);
}

TEST(RoutingStats, ALostLineOfUnnumberedMicrobatchesTakesTheWholeStepAway) {
  // Rank 1 lost its first of two: its second now stands beside rank 0's first.
  RoutingTrace trace = trace_of({{0, 0, 0, 0, 10},
                                 {0, 1, 0, 0, 90},
                                 {0, 0, 0, 1, 10},
                                 {1, 0, 0, 0, 10},
                                 {1, 1, 0, 0, 10},
                                 {1, 0, 0, 1, 10},
                                 {1, 1, 0, 1, 10}});
  trace.numbered_by_order = true;
  const RoutingStats stats = routing_stats(trace);
  EXPECT_EQ(stats.steps, 1);
  EXPECT_EQ(stats.incomplete_cells, 2);
}

TEST(RoutingStats, FindsAColdStart) {
  std::vector<double> factors;
  for (int i = 0; i < 500; ++i) factors.push_back(1.2 + 0.7 * std::exp2(-i / 40.0));
  const RoutingStats cold = routing_stats(trace_of_factors(factors));
  EXPECT_TRUE(cold.cold_start.present);
  // Settled at 1.05 * 1.2 = 1.26: 0.7 * 2^(-i / 40) < 0.06 from i = 142 on; windows of 10.
  EXPECT_EQ(cold.cold_start.iterations, 140);
  EXPECT_NEAR(cold.cold_start.settled, 1.2, 0.01);
  ASSERT_EQ(cold.by_tenth.size(), 10U);
  EXPECT_GT(cold.by_tenth[0], cold.by_tenth[1]);
  const RoutingStats calm = routing_stats(trace_of_factors(std::vector<double>(500, 1.3)));
  EXPECT_FALSE(calm.cold_start.present);
  EXPECT_EQ(calm.cold_start.iterations, 0);
}

TEST(RoutingLoads, GivesARanksFactorsByMicrobatchAndLayer) {
  // Rank 1, layers 2 and 3: 30 of (10 + 30) / 2 = 1.5 and 20 of 20 = 1.0, then 10 of 20 and 40 of
  // 20. Rank 2 has another layer.
  const RoutingTrace trace = trace_of({{0, 0, 2, 0, 10},
                                       {0, 0, 2, 1, 30},
                                       {0, 0, 3, 0, 20},
                                       {0, 0, 3, 1, 20},
                                       {0, 1, 2, 0, 30},
                                       {0, 1, 2, 1, 10},
                                       {0, 1, 3, 0, 0},
                                       {0, 1, 3, 1, 40},
                                       {0, 1, 7, 2, 5}});
  const std::vector<RankLoads> loads = rank_loads(trace, 1);
  ASSERT_EQ(loads.size(), 1U);
  EXPECT_THAT(loads[0].layers, ElementsAre(2, 3));
  EXPECT_THAT(loads[0].factors, ElementsAre(1.5, 1.0, 0.5, 2.0));
  const RoutedLoads routed = routed_loads(loads[0], 5, /*first_layer=*/1);
  // Layers of the model 1 and 2; the others at 1.
  EXPECT_DOUBLE_EQ(routed.at(1, 0), 1.5);
  EXPECT_DOUBLE_EQ(routed.at(2, 1), 2.0);
  EXPECT_DOUBLE_EQ(routed.at(2, 3), 2.0) << "micro-batches wrap round";
  EXPECT_DOUBLE_EQ(routed.at(4, 0), 1.0);
  EXPECT_THAT(routed.by_layer, ElementsAre(1.0, 1.0, 1.5, 1.0, 1.0));
  EXPECT_THAT(routed.spikes, ElementsAre(Pair(0, 1.1), Pair(1, 1.1))) << "5.5 / 5 each";
  EXPECT_EQ(hottest_rank_loads(trace)[0].rank, 1);
  EXPECT_TRUE(rank_loads(trace, 9).empty());
}

TEST(RoutingLoads, AnUnknownFactorIsTheMeanOfTheOthers) {
  std::vector<RoutedRecord> records;
  for (int m = 0; m < 4; ++m) {
    records.push_back({0, m, 0, 0, 10 + 10 * m});
    if (m != 3) records.push_back({0, m, 0, 1, 10});
  }
  // Factors 1, 20 / 15, 30 / 20, unknown.
  const std::vector<RankLoads> loads = rank_loads(trace_of(records), 0);
  EXPECT_THAT(loads[0].factors, ElementsAre(DoubleEq(1), DoubleEq(4.0 / 3), DoubleEq(1.5),
                                            DoubleNear(23.0 / 18, 1e-12)));
}

TEST(RoutingLoads, EveryStageHasItsOwnHottestRank) {
  // Layer 0 is dense. Layer 1 (number 2) lies on ranks 0 1, layer 2 (number 3) on ranks 2 3.
  ModelSpec model;
  model.layers = 3;
  model.moe_layer = {0, 1, 1};
  RoutingTrace trace = trace_of({{0, 0, 2, 0, 30},
                                 {0, 0, 2, 1, 10},
                                 {0, 1, 2, 0, 10},
                                 {0, 1, 2, 1, 10},
                                 {0, 0, 3, 2, 5},
                                 {0, 0, 3, 3, 15},
                                 {0, 1, 3, 2, 10},
                                 {0, 1, 3, 3, 10}});
  trace.first_layer = 1;
  const std::vector<RoutedLoads> loads = iteration_loads(trace, model, "log");
  ASSERT_EQ(loads.size(), 1U);
  EXPECT_THAT(loads[0].by_microbatch,
              ElementsAre(ElementsAre(1.0, 1.5, 1.5), ElementsAre(1.0, 1.0, 1.0)));
  trace.first_layer = 2;
  EXPECT_THROW(iteration_loads(trace, model, "log"), InvalidInput) << "number 2 is now layer 0";
  // In an expert trace number 0 is the first layer with experts.
  RoutingTrace experts = trace_of({{0, 0, 0, 0, 30}, {0, 0, 0, 1, 10}});
  experts.moe_layers_only = true;
  EXPECT_THAT(iteration_loads(experts, model, "log")[0].by_layer, ElementsAre(1.0, 1.5, 1.0));
}

TEST(ColdRouter, DecaysFromStartToCalm) {
  EXPECT_DOUBLE_EQ(cold_router(0).factor, 4.0);
  EXPECT_DOUBLE_EQ(cold_router(100).factor, 1.2 + 1.4) << "half of the excess";
  EXPECT_DOUBLE_EQ(cold_router(500).factor, 1.2);
  EXPECT_DOUBLE_EQ(cold_router(0, {}, 2.0).factor, 2.0) << "no routing can be worse";
  for (int i = 1; i < 600; ++i) EXPECT_LE(cold_router(i).factor, cold_router(i - 1).factor);
}

}  // namespace
}  // namespace bagualu
