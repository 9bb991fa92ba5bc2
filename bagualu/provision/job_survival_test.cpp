#include "bagualu/provision/job_survival.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

namespace bagualu {
namespace {

Job job_of(const std::string& model, const std::string& layout, int64_t microbatches = 16) {
  Job job;
  job.model =
      model_from_file(std::string(BAGUALU_SOURCE_DIR) + "/configs/models/" + model + ".json");
  job.layout = parse_layout(layout, "test", "layout");
  job.stages = default_stages(job.model, job.layout.pp, 1);
  job.microbatches = microbatches;
  job.optimizer.distributed = true;
  validate(job, "test");
  return job;
}

TEST(WorstImbalance, IsEveryTokenOnOneRankAsOftenAsItHasExperts) {
  // 64 ranks of 4 experts, top 8: each of 64 ranks' tokens comes 4 times instead of 8 / 64 times.
  EXPECT_DOUBLE_EQ(worst_imbalance(job_of("deepseek-v3", "pp=16,ep=64,dp=64")), 32);
  // 8 ranks of one expert, top 2.
  EXPECT_DOUBLE_EQ(worst_imbalance(job_of("mixtral-8x7b", "pp=4,ep=8,dp=8")), 4);
  EXPECT_DOUBLE_EQ(worst_imbalance(job_of("mixtral-8x7b", "pp=4,ep=1,dp=8")), 1);
}

TEST(WorstImbalance, EndsAtTheCapacity) {
  Job job = job_of("mixtral-8x7b", "pp=4,ep=8,dp=8");
  job.moe.capacity_factor = 1.5;
  EXPECT_DOUBLE_EQ(worst_imbalance(job), 1.5);
}

TEST(PossibleLoads, EndAtTheWorstImbalance) {
  const Job job = job_of("mixtral-8x7b", "pp=4,ep=8,dp=8");  // 4 at most
  const RoutedLoads asked = {.factor = 5, .spikes = {{3, 9.0}, {4, 2.0}}};
  const RoutedLoads expected = {.factor = 4, .spikes = {{3, 4.0}, {4, 2.0}}};
  EXPECT_EQ(possible_loads(asked, job), expected);
  const RoutedLoads below = {.factor = 0.5};
  EXPECT_EQ(possible_loads(below, job), below);
}

TEST(LargestSurvivableFactor, IsTheLastThatFits) {
  const Job job = job_of("mixtral-8x7b", "pp=4,ep=8,dp=8");
  const JobMemory memory(job);
  for (int64_t rank = 0; rank < 4; ++rank) {
    const int64_t budget = memory.peak_bytes(rank, {.factor = 1.7});
    const double factor = largest_survivable_factor(job, memory, rank, budget);
    EXPECT_NEAR(factor, 1.7, 1.0 / 512) << rank;
    EXPECT_LE(memory.peak_bytes(rank, {.factor = factor}), budget);
    EXPECT_GT(memory.peak_bytes(rank, {.factor = factor + 1.0 / 512}), budget);
    const int64_t static_bytes = memory.static_bytes(rank);
    EXPECT_EQ(largest_survivable_factor(job, memory, rank, static_bytes), 0);
    const int64_t all = memory.peak_bytes(rank, {.factor = 4});
    EXPECT_EQ(largest_survivable_factor(job, memory, rank, all), 4);
  }
}

TEST(OomForecast, CountsIterationsWithAnyRankOverTheBudget) {
  const Job job = job_of("mixtral-8x7b", "pp=4,ep=8,dp=8");
  const JobMemory memory(job);
  int64_t budget = 0;  // of the heaviest rank at 1.5
  for (int64_t rank = 0; rank < 4; ++rank) {
    budget = std::max(budget, memory.peak_bytes(rank, {.factor = 1.5}));
  }
  const std::vector<RoutedLoads> trace = {
      {.factor = 1.0}, {.factor = 1.4}, {.factor = 2.6}, {.factor = 1.1}};
  const OomForecast forecast = oom_forecast(job, memory, budget, trace);
  EXPECT_EQ(forecast.iterations, 4);
  EXPECT_EQ(forecast.iterations_over, 1);
  EXPECT_DOUBLE_EQ(forecast.per_1000, 250);
  EXPECT_GT(forecast.at_least_one_in_1000, 0.999999);
  EXPECT_EQ(forecast.worst_iteration, 2);
  EXPECT_GT(forecast.worst_peak_bytes, budget);
}

TEST(JobActions, LeaveOutWhatTheFrameworkExcludes) {
  Job job = job_of("deepseek-v3", "pp=16,ep=64,dp=64");
  const auto has = [&](const std::string& name) {
    for (const auto& [action, changed] : job_actions(job)) {
      if (action == name) return true;
    }
    return false;
  };
  EXPECT_TRUE(has("recompute moe"));
  EXPECT_TRUE(has("offload expert_fc1"));
  EXPECT_TRUE(has("recompute mla_up_proj"));
  job.offload.modules = {"expert_fc1"};
  EXPECT_FALSE(has("recompute moe"));
  EXPECT_FALSE(has("offload expert_fc1"));
  job.offload.modules = {};
  job.recompute.granularity = RecomputeGranularity::kSelective;
  job.recompute.modules = {"moe"};
  EXPECT_FALSE(has("offload moe_act"));
  job.recompute.granularity = RecomputeGranularity::kFull;
  EXPECT_TRUE(job_actions(job).empty());
}

}  // namespace
}  // namespace bagualu
