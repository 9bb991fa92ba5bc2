#include "bagualu/provision/job_search.h"

#include <gtest/gtest.h>

#include <string>

#include "bagualu/base/units.h"
#include "bagualu/provision/job_survival.h"
#include "bagualu/schedule/job_memory.h"
#include "bagualu/schedule/job_time.h"

namespace bagualu {
namespace {

Job mixtral() {
  Job job;
  job.model = model_from_file(BAGUALU_SOURCE_DIR "/configs/models/mixtral-8x7b.json");
  job.layout = parse_layout("tp=2,pp=4,ep=8,dp=8", "test", "layout");
  job.stages = default_stages(job.model, 4, 1);
  job.microbatches = 32;
  job.optimizer.distributed = true;
  validate(job, "test");
  return job;
}

SystemSpec h100() { return system_from_file(BAGUALU_SOURCE_DIR "/configs/systems/h100.json"); }

int64_t heaviest(const Job& job, const RoutedLoads& loads) {
  const JobMemory memory(job);
  int64_t bytes = 0;
  for (int64_t rank = 0; rank < job.layout.pp; ++rank) {
    bytes = std::max(bytes, memory.peak_bytes(rank, loads));
  }
  return bytes;
}

TEST(JobSearch, EveryAnswerIsAValidJobThatFitsAndIsPricedAsAlone) {
  const Job base = mixtral();
  const RoutedLoads loads = {.factor = 1.2};
  const SearchResult found = search_jobs(base, h100(), {}, loads, 80 * kGiB);
  ASSERT_FALSE(found.best.empty());
  EXPECT_GE(found.configurations, found.fitting);
  for (const SearchPoint& point : found.best) {
    const Job job = job_of(base, found, point);
    validate(job, "found");
    EXPECT_EQ(job.layout.world_size, 64);
    EXPECT_EQ(job.micro_batch_size * job.microbatches * job.layout.dp(), 32 * 8);
    const RoutedLoads possible = possible_loads(loads, job);  // 1 where a rank has every expert
    EXPECT_EQ(heaviest(job, possible), point.peak_bytes);
    EXPECT_LE(point.peak_bytes, 80 * kGiB);
    EXPECT_EQ(job_time(job, h100(), possible).iteration_ns, point.iteration_ns);
  }
  for (size_t i = 1; i < found.best.size(); ++i) {
    EXPECT_LE(found.best[i - 1].iteration_ns, found.best[i].iteration_ns);
  }
}

TEST(JobSearch, FrontSurvivesMoreForEveryLossOfSpeed) {
  const SearchResult found = search_jobs(mixtral(), h100(), {}, {.factor = 1.0}, 40 * kGiB);
  ASSERT_FALSE(found.pareto.empty());
  EXPECT_EQ(found.pareto.front().iteration_ns, found.best.front().iteration_ns);
  for (size_t i = 1; i < found.pareto.size(); ++i) {
    EXPECT_GT(found.pareto[i].survivable_factor, found.pareto[i - 1].survivable_factor);
    EXPECT_GE(found.pareto[i].iteration_ns, found.pareto[i - 1].iteration_ns);
  }
  for (const SearchPoint& point : found.pareto) {
    const Job job = job_of(mixtral(), found, point);
    EXPECT_LE(heaviest(job, {.factor = point.survivable_factor}), 40 * kGiB);
    if (point.survivable_factor < worst_imbalance(job)) {
      EXPECT_GT(heaviest(job, {.factor = point.survivable_factor + 1.0 / 512}), 40 * kGiB);
    }
  }
}

TEST(JobSearch, SaysWhatIsMissingWhereNothingFits) {
  const SearchResult found = search_jobs(mixtral(), h100(), {}, {}, 2 * kGiB);
  EXPECT_EQ(found.fitting, 0);
  EXPECT_TRUE(found.best.empty());
  EXPECT_GT(found.short_by_bytes, 0);
  const Job nearest = job_of(mixtral(), found, found.nearest);
  EXPECT_EQ(heaviest(nearest, {}) - 2 * kGiB, found.short_by_bytes);
}

TEST(JobSearch, GivesTheSameAnswerTwice) {
  const SearchResult a = search_jobs(mixtral(), h100(), {}, {.factor = 1.2}, 60 * kGiB);
  const SearchResult b = search_jobs(mixtral(), h100(), {}, {.factor = 1.2}, 60 * kGiB);
  ASSERT_EQ(a.best.size(), b.best.size());
  for (size_t i = 0; i < a.best.size(); ++i) {
    EXPECT_EQ(a.best[i].layout, b.best[i].layout);
    EXPECT_EQ(a.best[i].recompute, b.best[i].recompute);
  }
}

}  // namespace
}  // namespace bagualu
