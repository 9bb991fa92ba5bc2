#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "bagualu/base/error.h"
#include "bagualu/provision/job_survival.h"
#include "bagualu/schedule/job_memory.h"
#include "bagualu/schedule/job_time.h"
#include "bagualu/sim/scenario.h"

namespace bagualu {
namespace {

namespace fs = std::filesystem;

const Scenario& scenario() {
  static const Scenario kRead = scenario_from_file(fs::path(BAGUALU_SOURCE_DIR) / "configs" /
                                                   "scenarios" / "qwen3-235b-256-h100.json");
  return kRead;
}

SimPolicy settings(const std::string& policy, int64_t budget_bytes) {
  return published_settings(policy, scenario().job, scenario().system, budget_bytes);
}

Job with_modules(const std::vector<std::string>& modules) {
  Job job = scenario().job;
  if (!modules.empty()) job.recompute.granularity = RecomputeGranularity::kSelective;
  job.recompute.modules = modules;
  return job;
}

int64_t peak_bytes(const Job& job, double factor) {
  const JobMemory memory(job);
  int64_t peak = 0;
  for (int64_t rank = 0; rank < job.layout.pp; ++rank) {
    peak = std::max(peak, memory.peak_bytes(rank, {.factor = factor}));
  }
  return peak;
}

TEST(PublishedSettings, SelectiveIsTheFastestSetThatFitsCalmLoads) {
  const int64_t all = peak_bytes(with_modules({}), kRivalFitImbalance);
  const int64_t light = peak_bytes(with_modules({"moe_act"}), kRivalFitImbalance);
  ASSERT_LT(light, all);
  EXPECT_EQ(settings("selective", all).policy, "save-all");
  for (const int64_t budget : {all - 1, light, light - 1, light - (all - light)}) {
    const SimPolicy made = settings("selective", budget);
    EXPECT_EQ(made.label, "selective");
    EXPECT_EQ(made.policy, "selective");
    const Job job = with_modules(made.options.recompute_modules);
    EXPECT_LE(peak_bytes(job, kRivalFitImbalance), budget);
    // No single module that fits as well is faster.
    const auto ns = [](const Job& of) {
      return job_time(of, scenario().system, {.factor = kRivalFitImbalance}).iteration_ns;
    };
    for (const std::string& module : recompute_modules_of(scenario().job.model)) {
      const Job other = with_modules({module});
      if (peak_bytes(other, kRivalFitImbalance) <= budget) {
        EXPECT_LE(ns(job), ns(other)) << module;
      }
    }
  }
}

TEST(PublishedSettings, SelectiveTakesTheSmallestSetWhereNoneFits) {
  const std::vector<std::string> least = settings("selective", 1).options.recompute_modules;
  for (const std::string& module : recompute_modules_of(scenario().job.model)) {
    EXPECT_LE(peak_bytes(with_modules(least), kRivalFitImbalance),
              peak_bytes(with_modules({module}), kRivalFitImbalance));
  }
}

TEST(PublishedSettings, ThresholdAndRetryActJustBelowTheLoadThatFits) {
  // Everything saved fits 1.5 times the balanced load, and not 1.6 times.
  const int64_t budget = peak_bytes(with_modules({}), 1.52);
  for (const double factor : {settings("threshold", budget).options.threshold,
                              settings("retry", budget).options.retry_factor}) {
    EXPECT_DOUBLE_EQ(factor, 1.5);
  }
  EXPECT_EQ(settings("threshold", 1).options.threshold, 1.0);
}

TEST(PublishedSettings, FitPlansToCalmLoads) {
  EXPECT_EQ(settings("static", 0).options.static_fit_imbalance, 1.2);
  EXPECT_EQ(settings("adapipe", 0).options.adapipe_fit_imbalance, 1.2);
  const PolicyOptions kwai = settings("kwai", 0).options;
  EXPECT_EQ(kwai.kwai_fit_imbalance, 1.2);
  EXPECT_FALSE(kwai.kwai_offload_ratio.has_value()) << "the smallest that fits, by stage";
  for (const std::string& rival : rival_names()) EXPECT_FALSE(settings(rival, 0).overlap) << rival;
  EXPECT_TRUE(settings("adaptive", 0).overlap);
  EXPECT_THROW(settings("kway", 0), InvalidInput);
}

}  // namespace
}  // namespace bagualu
