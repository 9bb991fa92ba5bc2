#include "bagualu/cli/calibrate_figures.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

using testing::HasSubstr;

Json system_json() {
  return parse_json_object(R"({"format": "bagualu.system", "version": 1, "name": "x",
    "provenance": "derived", "fp32_flops_per_s": 1e12, "bf16_flops_per_s": 1e12,
    "compute_efficiency_fraction": 0.5, "memory_bytes_per_s": 1e11, "link_bytes_per_s": 1e9,
    "d2h_bytes_per_s": 1e9, "h2d_bytes_per_s": 1e9, "encode_bytes_per_s": 1e9,
    "copy_hidden_fraction": 0.5, "launch_ns": 0})",
                           "system");
}

/// Three units of compute, four if everything is recomputed, and one of communication.
SimRun made_up_run(const Scenario& scenario, const SimPolicy& policy, const SimOptions& options) {
  EXPECT_EQ(options.iterations, 6);
  const double compute = policy.policy == "full-recompute" ? 4 : 3;
  SimRun run;
  run.mfu_calm_fraction = 3 / (compute / scenario.system.gemm_efficiency_fraction +
                               0.5 / scenario.system.collective_efficiency_fraction);
  return run;
}

FigureRequest request() {
  FigureRequest request;
  request.system = system_json();
  request.where = "x.json";
  request.scenario.name = "some";
  request.figures = parse_figures("full-recompute=0.246,static=0.3", "test");
  request.keys = {"gemm_efficiency_fraction", "collective_efficiency_fraction"};
  request.iterations = 6;
  return request;
}

TEST(CalibrateFigures, FitsTheMachineToTheFiguresOfItsPolicies) {
  const FigureFit fit = fit_scenario_figures(request(), made_up_run);
  EXPECT_TRUE(fit.solved);
  EXPECT_NEAR(fit.numbers[0].after, 0.4556, 0.004);  // figure_fit_test.cpp has the arithmetic
  EXPECT_NEAR(fit.numbers[1].after, 0.1464, 0.004);
  std::ostringstream out;
  print_figures(request(), fit, out);
  EXPECT_THAT(out.str(), HasSubstr("gemm_efficiency_fraction"));
  EXPECT_THAT(out.str(), HasSubstr("24.60 %"));
  const Json json = figures_json(request(), fit);
  EXPECT_EQ(json["system"]["fit"]["scenario"], "some");
  EXPECT_EQ(json["system"]["provenance"], "fitted");
  EXPECT_EQ(json["system"]["name"], "x-fitted");
}

TEST(CalibrateFigures, RefusesFiguresThatAreNone) {
  for (const char* text : {"static", "static=2", "static=", "unknown=0.3", "static=x"}) {
    EXPECT_THROW(parse_figures(text, "test"), InvalidInput) << text;
  }
}

TEST(CalibrateFigures, SaysWhichPolicyCannotRun) {
  const auto dead = [](const Scenario&, const SimPolicy&, const SimOptions&) { return SimRun{}; };
  try {
    fit_scenario_figures(request(), dead);
    FAIL();
  } catch (const InvalidInput& error) {
    EXPECT_THAT(error.what(), HasSubstr("full-recompute"));
  }
}

}  // namespace
}  // namespace bagualu
