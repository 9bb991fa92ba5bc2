#include "bagualu/cost/figure_fit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

Json system_json() {
  return parse_json_object(R"({"format": "bagualu.system", "version": 1, "name": "x",
    "provenance": "derived", "fp32_flops_per_s": 1e12, "bf16_flops_per_s": 1e12,
    "compute_efficiency_fraction": 0.5, "memory_bytes_per_s": 1e11, "link_bytes_per_s": 1e9,
    "d2h_bytes_per_s": 1e9, "h2d_bytes_per_s": 1e9, "encode_bytes_per_s": 1e9,
    "copy_hidden_fraction": 0.5, "launch_ns": 0})",
                           "system");
}

const std::vector<std::string> kKeys = {"gemm_efficiency_fraction",
                                        "collective_efficiency_fraction"};

/// A step of three units of compute, or four with everything recomputed, and one of communication.
std::vector<double> figures(const SystemSpec& system) {
  const auto of = [&](double compute) {
    return 3 / (compute / system.gemm_efficiency_fraction +
                0.5 / system.collective_efficiency_fraction);
  };
  return {of(4), of(3)};
}

TEST(FigureFit, FindsTheTwoNumbersBehindTwoFigures) {
  // 3 / (4 / g + 0.5 / c) = 0.246 and 3 / (3 / g + 0.5 / c) = 0.3: 1 / g = 12.1951 - 10 = 2.1951,
  // g = 0.4556; 0.5 / c = 10 - 6.5854 = 3.4146, c = 0.1464.
  const FigureFit fit =
      fit_figures(system_json(), "system", kKeys, {{"full", 0.246}, {"static", 0.300}}, figures);
  EXPECT_TRUE(fit.solved);
  EXPECT_NEAR(fit.numbers[0].after, 0.4556, 0.004);
  EXPECT_NEAR(fit.numbers[1].after, 0.1464, 0.004);
  EXPECT_DOUBLE_EQ(fit.numbers[1].before, 0.75);
  for (const PublishedFigure& figure : fit.figures) {
    EXPECT_NEAR(figure.predicted / figure.value, 1, kFigureTolerance * 1.01);
    EXPECT_GT(std::abs(figure.unfitted / figure.value - 1), 0.1);
  }
  EXPECT_LT(fit.predictions, 60);
}

TEST(FigureFit, WritesASystemFileThatReadsBackAndSaysWhereItsNumbersComeFrom) {
  const FigureFit fit =
      fit_figures(system_json(), "system", kKeys, {{"full", 0.246}, {"static", 0.300}}, figures);
  const SystemSpec read = system_from_json(fit.system, "fitted");
  EXPECT_EQ(read.provenance, "fitted");
  EXPECT_DOUBLE_EQ(read.gemm_efficiency_fraction, fit.numbers[0].after);
  EXPECT_DOUBLE_EQ(fit.system["fit"]["figures"]["full"]["published"].get<double>(), 0.246);
  EXPECT_EQ(fit.system["fit"]["solved"], true);
}

TEST(FigureFit, SaysSoIfNoNumbersGiveTheFigures) {
  // At an efficiency of 1 both are at most 3 / 3.5: 0.9 is out of reach.
  const FigureFit fit =
      fit_figures(system_json(), "system", kKeys, {{"full", 0.9}, {"static", 0.95}}, figures);
  EXPECT_FALSE(fit.solved);
  EXPECT_EQ(fit.system["fit"]["solved"], false);
  EXPECT_LE(fit.numbers[0].after, 1);
}

TEST(FigureFit, ComesAsCloseAsABoundAllows) {
  // g = 0.5 and c = 2 give 3 / 8.25 = 0.3636 and 3 / 6.25 = 0.48, but c ends at 1. There g = 0.5185
  // gives 3 / 8.215 = 0.3652 and 3 / 6.286 = 0.4773, half a per cent off on either side.
  const FigureFit fit = fit_figures(system_json(), "system", kKeys,
                                    {{"full", 3 / 8.25}, {"static", 3 / 6.25}}, figures);
  EXPECT_FALSE(fit.solved);
  EXPECT_NEAR(fit.numbers[1].after, 1, 0.01);
  EXPECT_NEAR(fit.figures[0].predicted / fit.figures[0].value, 1, 0.01);
  EXPECT_NEAR(fit.figures[1].predicted / fit.figures[1].value, 1, 0.01);
}

TEST(FigureFit, RefusesOtherKeysAndOtherCounts) {
  EXPECT_THROW(fit_figures(system_json(), "system", {"gemm_efficiency_fraction"},
                           {{"full", 0.246}, {"static", 0.300}}, figures),
               InvalidInput);
  EXPECT_THROW(fit_figures(system_json(), "system", {"bf16_flops_per_s", "launch_ns"},
                           {{"full", 0.246}, {"static", 0.300}}, figures),
               InvalidInput);
}

}  // namespace
}  // namespace bagualu
