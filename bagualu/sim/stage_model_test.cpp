#include "bagualu/sim/stage_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <chrono>
#include <random>
#include <string>

#include "bagualu/base/units.h"
#include "bagualu/model/model_spec.h"
#include "bagualu/model/strategy.h"
#include "bagualu/schedule/job_memory.h"
#include "bagualu/sim/program_bytes.h"

namespace bagualu {
namespace {

const std::string kConfigs = std::string(BAGUALU_SOURCE_DIR) + "/configs/";

SystemSpec h100() { return system_from_file(kConfigs + "systems/h100.json"); }

/// 16 layers with 64 experts on 4 pipeline ranks, 8 to an expert group.
Job small_job(int64_t microbatches = 8, PipelineKind kind = PipelineKind::k1F1B) {
  Job job;
  ModelSpec& m = job.model;
  m.name = "small";
  m.layers = 16;
  m.hidden = 2048;
  m.heads = 16;
  m.kv_heads = 4;
  m.head_dim = 128;
  m.vocab = 32000;
  m.experts = 64;
  m.top_k = 6;
  m.expert_ffn = 1024;
  m.shared_ffn = 2048;
  m.moe_layer.assign(16, 1);
  job.layout.pp = 4;
  job.layout.ep = 8;
  job.layout.world_size = 32;
  job.pipeline = kind;
  job.seq = 4096;
  job.microbatches = microbatches;
  job.stages = default_stages(m, 4, virtual_stages_per_rank(kind, 1));
  validate(job, "test");
  return job;
}

SimPolicy by(const std::string& policy, bool overlap = false) {
  SimPolicy made;
  made.label = made.policy = policy;
  made.overlap = overlap;
  return made;
}

std::vector<int32_t> random_rows(const StageModel& model, int pp_rank, double most,
                                 std::mt19937& random) {
  std::vector<int32_t> rows(static_cast<size_t>(model.cells(pp_rank)));
  for (int32_t& one : rows) {
    const double factor = most * static_cast<double>(random() % 1001) / 1000.0;
    one = static_cast<int32_t>(factor * static_cast<double>(model.balanced_rows()));
  }
  return rows;
}

int64_t peak_of(const RankOutcome& outcome, const std::vector<int32_t>& rows) {
  return program_bytes(*outcome.program, rows.data()).peak_bytes;
}

TEST(StageModel, ProgramsHaveThePeaksOfTheDriver) {
  std::mt19937 random(3);
  for (const PipelineKind kind :
       {PipelineKind::k1F1B, PipelineKind::kZbH1, PipelineKind::kDualPipeV}) {
    for (const bool overlap : {false, true}) {
      const Job job = small_job(6, kind);
      const int64_t budget = 24 * kGiB;
      for (const std::string policy : {"adaptive", "full-recompute", "save-all", "kwai"}) {
        StageModel model(job, h100(), by(policy, overlap), budget, 0);
        for (const int rank : {0, 3}) {
          SCOPED_TRACE(policy + (overlap ? " overlap " : " ") + std::to_string(rank));
          const std::vector<int32_t> rows = random_rows(model, rank, 2.5, random);
          const RankOutcome outcome = model.decide(rank, rows.data());
          EXPECT_EQ(peak_of(outcome, rows), outcome.peak_bytes);
          if (policy == "adaptive") {
            EXPECT_EQ(model.short_by_bytes(rank), 0);
            EXPECT_FALSE(outcome.died);
            EXPECT_LE(outcome.peak_bytes, budget);
          }
        }
      }
    }
  }
}

TEST(StageModel, Measure) {
  const Job job = small_job(32);
  for (const std::string policy : {"adaptive", "full-recompute", "save-all"}) {
    for (const bool overlap : {false, true}) {
      const auto t0 = std::chrono::steady_clock::now();
      StageModel model(job, h100(), by(policy, overlap), 14 * kGiB, 0);
      const auto t1 = std::chrono::steady_clock::now();
      std::mt19937 random(3);
      const std::vector<int32_t> rows = random_rows(model, 1, 2.5, random);
      const RankOutcome one = model.decide(1, rows.data());
      const auto t2 = std::chrono::steady_clock::now();
      const std::vector<int32_t> even(rows.size(), static_cast<int32_t>(model.balanced_rows()));
      const RankOutcome calm = model.decide(1, even.data());
      const auto t3 = std::chrono::steady_clock::now();
      const auto ms = [](auto d) {
        return std::chrono::duration<double, std::milli>(d).count();
      };
      std::printf(
          "%s%s make %.1f ms, spiky %.1f ms (%ld mitigated of %ld, died %d, peak %.2f GiB), calm "
          "%.1f ms "
          "(%ld mitigated, peak %.2f), %zu instructions, %zu bytes, %zu times, short %.2f\n",
          policy.c_str(), overlap ? " overlap" : "", ms(t1 - t0), ms(t2 - t1),
          static_cast<long>(one.mitigated_gates), static_cast<long>(one.decisions), one.died,
          static_cast<double>(one.peak_bytes) / (1 << 30), ms(t3 - t2),
          static_cast<long>(calm.mitigated_gates),
          static_cast<double>(calm.peak_bytes) / (1 << 30), one.program->instructions.size(),
          one.program->bytes.size(), one.program->times.size(),
          static_cast<double>(model.short_by_bytes(1)) / (1 << 30));
    }
  }
}

}  // namespace
}  // namespace bagualu
