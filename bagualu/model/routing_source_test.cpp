#include "bagualu/model/routing_source.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <set>

#include "bagualu/base/error.h"
#include "bagualu/model/routing_random.h"
#include "bagualu/model/routing_series.h"
#include "bagualu/model/routing_stats.h"
#include "bagualu/model/routing_trace.h"

namespace bagualu {
namespace {

using Rows = std::vector<int32_t>;

RoutingGroup group_of(int64_t layers, int64_t microbatches, int64_t ranks) {
  return {layers, microbatches, ranks, 4096, 4096 * std::min<int64_t>(ranks, 4), 1};
}

RoutingShape shape_of(const std::string& kind, uint64_t seed = 7) {
  RoutingShape shape;
  shape.kind = kind;
  shape.seed = seed;
  if (kind == "fitted") shape.quantiles = {1.1, 1.2, 1.5, 3};
  return shape;
}

Rows rows_of(const RoutingShape& shape, int64_t iteration, const RoutingGroup& group,
             int64_t replica = 0) {
  Rows rows;
  make_routing_source(shape)->rows(iteration, replica, group, &rows);
  return rows;
}

/// The rows as a trace, so that routing_stats() judges them.
RoutingTrace trace_of(const RoutingShape& shape, int64_t iterations, const RoutingGroup& group,
                      int64_t replica = 0) {
  const auto source = make_routing_source(shape);
  RoutingTrace trace;
  Rows rows;
  for (int64_t i = 0; i < iterations; ++i) {
    source->rows(i, replica, group, &rows);
    const int32_t* row = rows.data();
    for (int64_t m = 0; m < group.microbatches; ++m) {
      for (int64_t layer = 0; layer < group.layers; ++layer) {
        for (int64_t rank = 0; rank < group.ranks; ++rank) {
          trace.records.push_back({static_cast<int32_t>(i), static_cast<int32_t>(m),
                                   static_cast<int32_t>(layer), static_cast<int32_t>(rank),
                                   *row++});
        }
      }
    }
  }
  return trace;
}

/// Rows of a rank in a layer over the iteration, over the balanced ones.
std::vector<double> factors_of(const Rows& rows, const RoutingGroup& group, int64_t layer) {
  std::vector<double> factors(static_cast<size_t>(group.ranks));
  for (int64_t m = 0; m < group.microbatches; ++m) {
    for (int64_t r = 0; r < group.ranks; ++r) {
      factors[static_cast<size_t>(r)] +=
          rows[static_cast<size_t>((m * group.layers + layer) * group.ranks + r)];
    }
  }
  for (double& f : factors) f /= static_cast<double>(group.balanced_rows * group.microbatches);
  return factors;
}

size_t hottest(const std::vector<double>& factors) {
  return static_cast<size_t>(std::max_element(factors.begin(), factors.end()) - factors.begin());
}

TEST(RoutingRandom, NumbersAreThoseWrittenDownOnce) {
  // SplitMix64 with seed 0: the generator's published first outputs.
  RandomBits bits(0);
  EXPECT_EQ(bits.next(), 0xe220a8397b1dcdafULL);
  EXPECT_EQ(bits.next(), 0x6e789e6aa1b965f4ULL);
}

TEST(RoutingRandom, NormalTableAgreesWithPrintedQuantiles) {
  EXPECT_NEAR(normal_cdf(1.959964), 0.975, 5e-6);
  EXPECT_NEAR(normal_cdf(-3.090232), 0.001, 5e-6);
  EXPECT_NEAR(normal_quantile(0.5), 0, 1e-9);
  EXPECT_NEAR(normal_quantile(0.995), 2.575829, 1e-3);
  for (const double z : {-6.0, -1.23, 0.4, 3.3}) {
    EXPECT_NEAR(normal_quantile(normal_cdf(z)), z, 1e-6);
  }
}

class EveryKind : public testing::TestWithParam<std::string> {};

TEST_P(EveryKind, KeepsSumsAndBounds) {
  // Odd and even counts, one micro-batch, one rank, rows few and limits tight.
  for (const RoutingGroup& group :
       {RoutingGroup{3, 4, 8, 4096, 16384, 1}, RoutingGroup{5, 3, 7, 10, 13, 4},
        RoutingGroup{2, 1, 2, 100, 200, 1}, RoutingGroup{2, 2, 1, 5, 5, 1},
        RoutingGroup{1, 5, 3, 1, 3, 2}, RoutingGroup{2, 2, 4, 0, 0, 1},
        RoutingGroup{2, 7, 16, 33, 33, 1}}) {
    const auto source = make_routing_source(shape_of(GetParam()));
    Rows rows;
    for (const int64_t iteration : {0, 1, 33, 270, 275, 5000}) {
      for (const int64_t replica : {0, 1, 5}) {
        source->rows(iteration, replica, group, &rows);
        ASSERT_EQ(static_cast<int64_t>(rows.size()),
                  group.layers * group.microbatches * group.ranks);
        for (size_t at = 0; at < rows.size(); at += static_cast<size_t>(group.ranks)) {
          const auto cell = rows.begin() + static_cast<long>(at);
          ASSERT_EQ(std::accumulate(cell, cell + group.ranks, int64_t{0}),
                    group.ranks * group.balanced_rows);
          ASSERT_GE(*std::min_element(cell, cell + group.ranks), 0);
          ASSERT_LE(*std::max_element(cell, cell + group.ranks), group.largest_rows);
        }
      }
    }
  }
}

TEST_P(EveryKind, SameArgumentsGiveTheSameRowsWhateverWasAskedBefore) {
  const RoutingGroup group = group_of(4, 4, 8);
  const auto source = make_routing_source(shape_of(GetParam()));
  EXPECT_EQ(source->name(), GetParam());
  Rows rows;
  source->rows(12, 3, group, &rows);
  source->rows(90, 0, group_of(2, 2, 4), &rows);
  source->rows(275, 1, group, &rows);
  EXPECT_EQ(rows, rows_of(shape_of(GetParam()), 275, group, 1));
  if (GetParam() != "balanced") {
    EXPECT_NE(rows, rows_of(shape_of(GetParam(), 8), 275, group, 1)) << "another seed";
    EXPECT_NE(rows, rows_of(shape_of(GetParam()), 276, group, 1));
    EXPECT_NE(rows, rows_of(shape_of(GetParam()), 275, group, 2)) << "another replica";
  }
}

TEST_P(EveryKind, SurvivesJson) {
  RoutingShape shape = shape_of(GetParam());
  shape.layer_profile = {1, 0.25};
  shape.autocorrelation = 0.3;
  EXPECT_EQ(routing_shape_from_json(to_json(shape), "file"), shape);
}

INSTANTIATE_TEST_SUITE_P(RoutingSource, EveryKind, testing::ValuesIn(routing_kinds()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

/// Digest of rows of every kind: changes with every change of a generator, and with a compiler or
/// libm that computes otherwise.
TEST(RoutingSource, BytesAreTheSameOnEveryMachine) {
  uint64_t digest = 0;
  for (const std::string& kind : routing_kinds()) {
    RoutingShape shape = shape_of(kind);
    shape.autocorrelation = 0.4;
    shape.layer_profile = {0.9, 1, 0.95};
    for (const int64_t iteration : {0, 33, 275}) {
      for (const int32_t row : rows_of(shape, iteration, group_of(3, 5, 8), 1)) {
        digest = mix_bits(digest + static_cast<uint64_t>(row));
      }
    }
  }
  EXPECT_EQ(digest, 3934810735009004008ULL);
}

class PaperFit : public testing::TestWithParam<double> {};

TEST_P(PaperFit, HasThePapersSharesAndTheStatedAutocorrelation) {
  RoutingShape shape = shape_of("paper", 3);
  shape.autocorrelation = GetParam();
  const RoutingStats stats = routing_stats(trace_of(shape, 20000, group_of(3, 2, 8)));
  ASSERT_EQ(stats.series.size(), 20000U);
  int64_t calm = 0;
  for (const IterationImbalance& i : stats.series) calm += i.factor < 1.2;
  // One standard deviation of independent iterations: sqrt(0.971 * 0.029 / 20000) = 0.12 points.
  EXPECT_NEAR(100.0 * static_cast<double>(calm) / 20000, 97.1, 0.4);
  EXPECT_GT(stats.iterations.largest, 2.3);
  EXPECT_LE(stats.iterations.largest, 2.6);
  EXPECT_NEAR(stats.autocorrelation[0].value(), GetParam(), 0.05);
  // Half of the calm ones below 1.1; factors are exact but for one row of 8,192.
  EXPECT_NEAR(stats.iterations.p50, 1.1, 0.01);
}

INSTANTIATE_TEST_SUITE_P(RoutingSource, PaperFit, testing::Values(0.0, 0.3, 0.6));

TEST(RoutingSource, LargestFactorOverReplicasIsTheJobs) {
  RoutingGroup group = group_of(2, 2, 8);
  const auto source = make_routing_source(shape_of("paper"));
  RoutingGroup job = group;
  job.replicas = 12;
  std::vector<int64_t> reached(12);
  Rows rows;
  for (int64_t i = 0; i < 300; ++i) {
    source->rows(i, 0, group, &rows);
    double alone = 0;
    for (int64_t l = 0; l < 2; ++l) {
      const std::vector<double> f = factors_of(rows, group, l);
      alone = std::max(alone, f[hottest(f)]);
    }
    double most = 0;
    int64_t of = 0;
    for (int64_t replica = 0; replica < 12; ++replica) {
      source->rows(i, replica, job, &rows);
      for (int64_t l = 0; l < 2; ++l) {
        const std::vector<double> f = factors_of(rows, job, l);
        if (f[hottest(f)] > most) of = replica;
        most = std::max(most, f[hottest(f)]);
      }
    }
    ASSERT_DOUBLE_EQ(most, alone) << i;
    ++reached[static_cast<size_t>(of)];
  }
  EXPECT_GT(*std::min_element(reached.begin(), reached.end()), 5) << "each in turn, about 25 times";
}

TEST(RoutingSource, MicrobatchesSpreadAroundTheirIteration) {
  RoutingShape shape = shape_of("hot-rank");
  shape.microbatch_spread = 0.1;
  const RoutingGroup group = group_of(4, 16, 8);
  double squares = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < 40; ++i) {
    const Rows rows = rows_of(shape, i, group);
    for (int64_t layer = 0; layer < 4; ++layer) {
      const std::vector<double> f = factors_of(rows, group, layer);
      const size_t hot = hottest(f);
      EXPECT_NEAR(f[hot], 2.6, 1e-4);
      for (int64_t m = 0; m < 16; ++m, ++count) {
        const double ratio = rows[static_cast<size_t>((m * 4 + layer) * 8) + hot] / (4096 * f[hot]);
        squares += (ratio - 1) * (ratio - 1);
      }
    }
  }
  EXPECT_NEAR(std::sqrt(squares / static_cast<double>(count)), 0.1, 0.01);
}

TEST(RoutingSource, LayersKeepTheirProfile) {
  RoutingShape shape = shape_of("hot-rank");
  shape.kind = "fitted";
  shape.quantiles = {1.5, 2.5};  // mean 2
  shape.layer_profile = {0.7, 1, 0.85, 0.6};
  const RoutingStats stats = routing_stats(trace_of(shape, 2000, group_of(4, 1, 8)));
  for (size_t layer = 0; layer < 4; ++layer) {
    EXPECT_NEAR(stats.layers[layer].iterations.mean / stats.layers[1].iterations.mean,
                shape.layer_profile[layer], 0.01)
        << layer;
  }
  EXPECT_GT(stats.layers[1].hottest_fraction, 0.7);
}

TEST(RoutingSource, LayersAgreeOnTheHotRankAsOftenAsSaid) {
  RoutingShape shape = shape_of("paper");
  const RoutingGroup group = group_of(10, 1, 16);
  for (const double wanted : {1.0, 0.5}) {
    shape.rank_agreement = wanted;
    int64_t agree = 0;
    for (int64_t i = 0; i < 400; ++i) {
      const Rows rows = rows_of(shape, i, group);
      std::vector<int64_t> count(16);
      for (int64_t l = 0; l < 10; ++l) ++count[hottest(factors_of(rows, group, l))];
      agree += *std::max_element(count.begin(), count.end());
    }
    // At 0.5 the other half falls on the common rank in 1 of 16 draws; small counts lift the most.
    EXPECT_NEAR(static_cast<double>(agree) / 4000, wanted == 1 ? 1 : 0.53, 0.04);
  }
}

TEST(StressShapes, HotRankStaysTheSameAndSpreadHotIsAnotherInEachLayer) {
  const RoutingGroup group = group_of(12, 2, 8);
  std::set<size_t> hot;
  std::set<size_t> spread;
  for (const int64_t iteration : {0, 17, 900}) {
    const Rows rows = rows_of(shape_of("hot-rank"), iteration, group);
    const Rows other = rows_of(shape_of("spread-hot"), iteration, group);
    for (int64_t layer = 0; layer < 12; ++layer) {
      hot.insert(hottest(factors_of(rows, group, layer)));
      const std::vector<double> f = factors_of(other, group, layer);
      spread.insert(hottest(f));
      EXPECT_NEAR(f[hottest(f)], 2.6, 1e-3);
    }
  }
  EXPECT_EQ(hot.size(), 1U);
  EXPECT_GT(spread.size(), 3U);
}

TEST(StressShapes, HotExpertSetTakesMostRows) {
  const RoutingGroup group = group_of(2, 4, 8);
  std::vector<double> f = factors_of(rows_of(shape_of("hot-expert-set"), 3, group), group, 1);
  std::sort(f.begin(), f.end());
  // Two of eight ranks at 2.6 have 5.2 of 8 parts; the others 2.8 / 6 each.
  EXPECT_NEAR(f[7], 2.6, 1e-3);
  EXPECT_NEAR(f[6], 2.6, 1e-3);
  EXPECT_NEAR(f[5], 2.8 / 6, 1e-3);
  EXPECT_NEAR(f[0], 2.8 / 6, 1e-3);
}

TEST(StressShapes, ZeroLoadLeavesAQuarterOfTheRanksWithoutRows) {
  const RoutingGroup group = group_of(2, 4, 8);
  const Rows rows = rows_of(shape_of("zero-load"), 3, group);
  std::vector<double> f = factors_of(rows, group, 1);
  EXPECT_EQ(std::count(f.begin(), f.end(), 0.0), 2);
  EXPECT_EQ(std::count(rows.begin(), rows.end(), 0), 2 * 2 * 4) << "in every micro-batch";
  EXPECT_NEAR(f[hottest(f)], 8.0 / 6, 1e-3);
}

TEST(StressShapes, RotatingHotSpotMovesOneRankAnIteration) {
  const RoutingGroup group = group_of(3, 2, 8);
  size_t before = hottest(factors_of(rows_of(shape_of("rotating-hot-spot"), 0, group), group, 0));
  for (int64_t i = 1; i < 17; ++i) {
    const Rows rows = rows_of(shape_of("rotating-hot-spot"), i, group);
    const size_t now = hottest(factors_of(rows, group, 2));
    EXPECT_EQ(now, (before + 1) % 8);
    before = now;
  }
}

TEST(StressShapes, BurstsAreEightIterationsAsOftenAsThePapersSpikes) {
  const RoutingStats stats = routing_stats(trace_of(shape_of("burst"), 2760, group_of(2, 2, 8)));
  int64_t hot = 0;
  int64_t starts = 0;
  bool before = false;
  for (const IterationImbalance& i : stats.series) {
    const bool now = i.factor >= 1.2;
    hot += now;
    starts += now && !before;
    before = now;
  }
  // 8 / 0.029 = 276 iterations from one to the next.
  EXPECT_EQ(starts, 10);
  EXPECT_EQ(hot, 80);
}

TEST(StressShapes, RaggedSourceIsUnevenInAMicrobatchAndNearlyEvenOverTheIteration) {
  const RoutingGroup group = group_of(1, 64, 8);
  const Rows rows = rows_of(shape_of("ragged-source"), 0, group);
  for (size_t m = 0; m < 64; ++m) {
    EXPECT_EQ(*std::max_element(rows.begin() + static_cast<long>(m * 8),
                                rows.begin() + static_cast<long>(m * 8 + 8)),
              8192);
  }
  const std::vector<double> f = factors_of(rows, group, 0);
  EXPECT_LT(f[hottest(f)], 1.3);
}

TEST(StressShapes, ColdRouterBeginsAtFourAndCalms) {
  const RoutingGroup group = group_of(2, 2, 8);
  const auto at = [&](int64_t i) {
    const std::vector<double> f = factors_of(rows_of(shape_of("cold-router"), i, group), group, 1);
    return f[hottest(f)];
  };
  EXPECT_NEAR(at(0), 4.0, 1e-3);
  EXPECT_NEAR(at(100), 1.2 + 2.8 / 2, 1e-3);
  EXPECT_NEAR(at(500), 1.2, 1e-3);
}

TEST(RoutingShapeJson, RefusesWhatContradicts) {
  const auto field_of = [](const std::string& text) {
    try {
      routing_shape_from_json(parse_json_object(text, "shape.json"), "shape.json");
    } catch (const InvalidInput& error) {
      EXPECT_EQ(error.where(), "shape.json");
      return error.field();
    }
    return std::string("accepted");
  };
  EXPECT_EQ(field_of(R"({"kind": "paper"})"), "accepted");
  EXPECT_EQ(field_of(R"({"kind": "papr"})"), "kind");
  EXPECT_EQ(field_of(R"({"kind": "paper", "calm_fraction": 97.1})"), "calm_fraction");
  EXPECT_EQ(field_of(R"({"kind": "paper", "calm_limit": 3})"), "largest");
  EXPECT_EQ(field_of(R"({"kind": "paper", "autocorrelation": 1})"), "autocorrelation");
  EXPECT_EQ(field_of(R"({"kind": "paper", "layer_profile": [1, 0]})"), "layer_profile[1]");
  EXPECT_EQ(field_of(R"({"kind": "paper", "layer_profile": "flat"})"), "layer_profile");
  EXPECT_EQ(field_of(R"({"kind": "paper", "quantiles": [1, 2]})"), "quantiles");
  EXPECT_EQ(field_of(R"({"kind": "fitted"})"), "quantiles");
  EXPECT_EQ(field_of(R"({"kind": "fitted", "quantiles": [1.5, 1.2]})"), "quantiles[1]");
  EXPECT_EQ(field_of(R"({"kind": "paper", "larges": 2})"), "larges");
  EXPECT_EQ(field_of(R"({"format": "bagualu.system", "kind": "paper"})"), "format");
  EXPECT_THROW(make_routing_source(shape_of("nonsense")), InvalidInput);
}

TEST(RoutingShapeJson, UnknownKindListsThoseKnown) {
  try {
    routing_shape_from_json(parse_json_object(R"({"kind": "hot"})", "f"), "f");
    FAIL();
  } catch (const InvalidInput& error) {
    for (const std::string& kind : routing_kinds()) {
      EXPECT_NE(error.allowed().find(kind), std::string::npos) << kind;
    }
  }
}

TEST(RoutingSource, LargeModelTakesAMillisecond) {
  RoutingShape shape = shape_of("paper");
  shape.autocorrelation = 0.5;
  const auto source = make_routing_source(shape);
  const RoutingGroup group = group_of(61, 32, 32);
  Rows rows;
  double best = 1e9;
  for (int64_t i = 0; i < 50; ++i) {
    const auto start = std::chrono::steady_clock::now();
    source->rows(i, 0, group, &rows);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    best = std::min(best, took.count());
  }
  RecordProperty("best_ms", std::to_string(best));
  EXPECT_LT(best, 8) << "0.3 ms with optimisation; builds for coverage have none";
}

}  // namespace
}  // namespace bagualu
