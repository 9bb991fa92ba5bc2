#include "bagualu/cost/calibration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

Json system_json() {
  return parse_json_object(R"({"format": "bagualu.system", "version": 1, "name": "x",
    "provenance": "datasheet", "fp32_flops_per_s": 1e12, "bf16_flops_per_s": 1e12,
    "compute_efficiency_fraction": 0.5, "memory_bytes_per_s": 1e11, "link_bytes_per_s": 1e9,
    "d2h_bytes_per_s": 1e9, "h2d_bytes_per_s": 1e9, "encode_bytes_per_s": 1e9,
    "copy_hidden_fraction": 0.5, "launch_ns": 0})",
                           "system");
}

/// Rows whose times a machine with these two efficiencies would have.
double made_up_ns(const Job& job, const SystemSpec& system) {
  const double flops = static_cast<double>(job.microbatches) * 1e9;
  const double bytes = static_cast<double>(job.seq) * 1e5;
  return flops / (1e3 * system.gemm_efficiency_fraction) +
         bytes / (100 * system.memory_efficiency_fraction);
}

MeasuredJobs rows(int count, double gemm, double memory) {
  SystemSpec truth = system_from_json(system_json(), "system");
  truth.gemm_efficiency_fraction = gemm;
  truth.memory_efficiency_fraction = memory;
  MeasuredJobs jobs;
  for (int i = 0; i < count; ++i) {
    MeasuredJob row;
    row.id = std::string("row") + static_cast<char>('a' + i);
    row.group = std::string("group") + static_cast<char>('a' + i / 2);
    row.job.microbatches = 1 + i;
    row.job.seq = 4096 / (1 + i % 3);
    row.iteration_ns = made_up_ns(row.job, truth);
    jobs.rows.push_back(row);
  }
  return jobs;
}

TEST(Calibration, FindsTheNumbersThatMadeTheRows) {
  const Calibration result = calibrate(
      system_json(), "system", rows(8, 0.63, 0.41), made_up_ns,
      {.numbers = {"gemm_efficiency_fraction", "memory_efficiency_fraction"}, .hold_out = false});
  ASSERT_EQ(result.numbers.size(), 2u);
  EXPECT_NEAR(result.numbers[0].after, 0.63, 1e-3);
  EXPECT_NEAR(result.numbers[1].after, 0.41, 1e-3);
  EXPECT_DOUBLE_EQ(result.numbers[0].before, 0.5);
  EXPECT_LT(result.summary(true).largest_fraction, 1e-3);
  EXPECT_GT(result.unfitted_summary(true).mean_fraction, 0.05);
}

TEST(Calibration, WritesASystemFileThatReadsBackAndSaysWhereItsNumbersComeFrom) {
  const Calibration result = calibrate(system_json(), "system", rows(8, 0.63, 0.41), made_up_ns,
                                       {.numbers = {"gemm_efficiency_fraction"}});
  const SystemSpec read = system_from_json(result.system, "fitted");
  EXPECT_EQ(read.provenance, "fitted");
  EXPECT_DOUBLE_EQ(read.gemm_efficiency_fraction, result.numbers[0].after);
  // Groups a and c of a, b, c, d.
  EXPECT_EQ(result.system["fit"]["fitted_on"]["rows"].dump(), R"(["rowa","rowb","rowe","rowf"])");
  EXPECT_EQ(result.system["fit"]["tested_on"]["rows"].dump(), R"(["rowc","rowd","rowg","rowh"])");
}

TEST(Calibration, TakesOneNumberForThreeRows) {
  EXPECT_EQ(calibrate(system_json(), "system", rows(5, 0.6, 0.4), made_up_ns, {.hold_out = false})
                .numbers.size(),
            1u);
  EXPECT_EQ(calibrate(system_json(), "system", rows(7, 0.6, 0.4), made_up_ns, {.hold_out = false})
                .numbers.size(),
            2u);
  EXPECT_THROW(calibrate(system_json(), "system", rows(5, 0.6, 0.4), made_up_ns,
                         {.numbers = {"gemm_efficiency_fraction", "launch_ns"}, .hold_out = false}),
               InvalidInput);
  EXPECT_THROW(calibrate(system_json(), "system", rows(2, 0.6, 0.4), made_up_ns, {}), InvalidInput);
}

TEST(Calibration, RefusesWhatIsNoEfficiency) {
  try {
    calibrate(system_json(), "system", rows(6, 0.6, 0.4), made_up_ns,
              {.numbers = {"memory_bytes_per_s"}});
    FAIL();
  } catch (const InvalidInput& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("memory_efficiency_fraction"));
  }
}

TEST(MeasuredJobs, ReadsRowsOverDefaultsAndNamesWhatIsWrong) {
  Json json = parse_json_object(R"({"format": "bagualu.measured_jobs", "version": 1,
    "models": {"m": {"layers": 8, "hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16,
                     "vocab": 512, "experts": 0, "dense_ffn": 128}},
    "defaults": {"seq": 32, "recompute": {"granularity": "full"}},
    "rows": [{"id": "a", "model": "m", "layers": 4, "layout": "tp=2,pp=2,dp=2",
              "microbatches": 4, "iteration_ms": 2.5}]})",
                                "rows");
  const MeasuredJobs jobs = measured_jobs_from_json(json, "rows");
  ASSERT_EQ(jobs.rows.size(), 1u);
  const MeasuredJob& row = jobs.rows[0];
  EXPECT_EQ(row.group, "a");
  EXPECT_EQ(row.job.model.layers, 4);
  EXPECT_EQ(row.job.layout.dp(), 2);
  EXPECT_EQ(row.job.seq, 32);
  EXPECT_EQ(row.job.recompute.granularity, RecomputeGranularity::kFull);
  EXPECT_DOUBLE_EQ(row.iteration_ns, 2.5e6);
  json["rows"][0]["modle"] = "m";
  EXPECT_THROW(measured_jobs_from_json(json, "rows"), InvalidInput);
  json["rows"][0].erase("modle");
  json["rows"][0]["model"] = "other";
  EXPECT_THROW(measured_jobs_from_json(json, "rows"), InvalidInput);
}

}  // namespace
}  // namespace bagualu
