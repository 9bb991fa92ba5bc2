#include "bagualu/cli/plan_report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>

#include "bagualu/base/error.h"
#include "bagualu/provision/policy.h"

namespace bagualu {
namespace {

std::string config(const std::string& file) {
  return std::string(BAGUALU_SOURCE_DIR) + "/configs/" + file;
}

PlanRequest demo_request() {
  PlanRequest request;
  request.model = model_from_file(config("models/demo.json"));
  request.system = system_from_file(config("systems/cpu-2core.json"));
  request.shape = {2, 64, 4, Dtype::kFp32};
  request.layout = {4, 4};
  request.chunk_rows = 64;
  request.imbalance = 2.0;
  request.policies = policy_names();
  return request;
}

const PolicyOutcome& outcome_of(const PlanReport& report, const std::string& policy) {
  const auto found = std::find_if(report.policies.begin(), report.policies.end(),
                                  [&](const PolicyOutcome& o) { return o.policy == policy; });
  BGL_CHECK(found != report.policies.end(), policy);
  return *found;
}

TEST(PlanReport, OrdersThePeaks) {
  const PlanReport report = make_plan_report(demo_request());
  EXPECT_GT(report.calm_peak.bytes, report.static_memory.total_bytes());
  EXPECT_GT(report.loaded_peak.bytes, report.calm_peak.bytes);
  EXPECT_GT(report.floor.bytes, report.static_memory.total_bytes());
  EXPECT_LT(report.floor.bytes, report.loaded_peak.bytes);
  EXPECT_FALSE(report.calm_peak.at.empty());
  EXPECT_FALSE(report.floor.at.empty());
  EXPECT_EQ(report.worst_imbalance, 4.0) << "4 ranks: all tokens on one of them";
}

TEST(PlanReport, SumsTheLayersToWhatIsLiveAtTheEndOfForward) {
  const PlanReport report = make_plan_report(demo_request());
  ASSERT_EQ(report.layers.size(), 5u);
  int64_t saved = 0;
  for (const LayerBytes& layer : report.layers) {
    EXPECT_GT(layer.calm_bytes, 0) << layer.layer;
    EXPECT_GE(layer.loaded_bytes, layer.calm_bytes) << layer.layer;
    EXPECT_EQ(layer.kind, layer.layer < 0 ? "ends" : "moe");
    saved += layer.calm_bytes;
  }
  EXPECT_LE(report.static_memory.total_bytes() + saved, report.calm_peak.bytes);
}

TEST(PlanReport, WithoutABudgetAsksNoPolicy) {
  EXPECT_TRUE(make_plan_report(demo_request()).policies.empty());
}

TEST(PlanReport, ABudgetAtTheFloorSurvivesEverythingAdaptively) {
  PlanRequest request = demo_request();
  request.budget_bytes = make_plan_report(request).floor.bytes;
  const PlanReport report = make_plan_report(request);
  EXPECT_EQ(report.short_by_bytes, 0);
  const PolicyOutcome& adaptive = outcome_of(report, "adaptive");
  EXPECT_TRUE(adaptive.fits);
  EXPECT_EQ(adaptive.largest_imbalance, 4.0);
  EXPECT_FALSE(outcome_of(report, "save-all").fits);
}

TEST(PlanReport, ABudgetForCalmLoadIsTooSmallForStaticPlansUnderASpike) {
  PlanRequest request = demo_request();
  request.budget_bytes = make_plan_report(request).calm_peak.bytes;
  const PlanReport report = make_plan_report(request);
  const PolicyOutcome& save_all = outcome_of(report, "save-all");
  const PolicyOutcome& adaptive = outcome_of(report, "adaptive");
  EXPECT_FALSE(save_all.fits) << "the spike is 2x";
  EXPECT_NEAR(save_all.largest_imbalance, 1.0, 0.02);
  EXPECT_TRUE(adaptive.fits);
  EXPECT_LE(adaptive.peak.bytes, request.budget_bytes);
  EXPECT_GT(adaptive.largest_imbalance, save_all.largest_imbalance);
  EXPECT_FALSE(adaptive.repeats_step);
  // Buffers for 1.10x overflow at 2x.
  const PolicyOutcome& retry = outcome_of(report, "retry");
  EXPECT_TRUE(retry.repeats_step && retry.fits);
  EXPECT_GT(retry.exposed_ns, outcome_of(report, "full-recompute").exposed_ns);
  std::ostringstream out;
  print_table(request, report, out);
  EXPECT_NE(out.str().find(", runs every step twice"), std::string::npos) << out.str();
}

TEST(PlanReport, UnderTheFloorSaysTheMissingBytesAndAsksNoPolicy) {
  PlanRequest request = demo_request();
  request.budget_bytes = make_plan_report(request).floor.bytes - 1000;
  const PlanReport report = make_plan_report(request);
  EXPECT_EQ(report.short_by_bytes, 1000);
  EXPECT_TRUE(report.policies.empty());
}

TEST(PlanReport, PrintsParametersAndEqualLayersOnOneLine) {
  const PlanRequest request = demo_request();
  std::ostringstream out;
  print_table(request, make_plan_report(request), out);
  // 271,488 dense (static_memory_test.cpp) and 16 experts * 3 * 128 * 128 * 4 layers.
  EXPECT_NE(out.str().find("demo: 3.42 M parameters"), std::string::npos) << out.str();
  EXPECT_NE(out.str().find("layers 0-3 (moe), each"), std::string::npos) << out.str();
}

}  // namespace
}  // namespace bagualu
