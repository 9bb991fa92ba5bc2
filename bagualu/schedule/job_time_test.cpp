#include "bagualu/schedule/job_time.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace bagualu {
namespace {

Job job_of(int64_t pp, int64_t microbatches) {
  Job job;
  ModelSpec& m = job.model;
  m.layers = 8;
  m.hidden = 1024;
  m.heads = 16;
  m.kv_heads = 4;
  m.head_dim = 64;
  m.vocab = 32000;
  m.dense_ffn = 4096;
  m.moe_layer.assign(8, 0);
  job.seq = 2048;
  job.layout.pp = pp;
  job.layout.world_size = pp;
  job.microbatches = microbatches;
  job.stages = default_stages(m, pp, 1);
  validate(job, "job");
  return job;
}

Job moe_job(int64_t pp, int64_t microbatches) {
  Job job = job_of(pp, microbatches);
  ModelSpec& m = job.model;
  m.dense_ffn = 0;
  m.experts = 16;
  m.top_k = 2;
  m.expert_ffn = 1024;
  m.moe_layer.assign(8, 1);
  job.layout.ep = 4;
  job.layout.world_size = 4 * pp;
  validate(job, "job");
  return job;
}

SystemSpec system() {
  return system_from_file(BAGUALU_SOURCE_DIR "/tests/data/systems/b200-node.json");
}

TEST(JobTime, PartsAddUpToTheIteration) {
  Job job = job_of(4, 16);
  job.layout.world_size = 32;
  job.optimizer.distributed = true;
  const JobTime time = job_time(job, system(), {});
  EXPECT_EQ(time.iteration_ns, time.pipeline_ns + time.gradient_reduce_ns +
                                   time.parameter_gather_ns + time.optimizer_ns + time.overhead_ns);
  ASSERT_EQ(time.stages.size(), 4u);
  int64_t longest = 0;
  for (const StageTime& stage : time.stages) {
    longest = std::max(longest, stage.forward_ns + stage.backward_ns);
    EXPECT_EQ(stage.backward_ns,
              stage.input_gradient_ns + stage.weight_gradient_ns + stage.recompute_ns);
  }
  EXPECT_EQ(time.pipeline_ns, 16 * longest + time.bubble_ns);
  EXPECT_GT(time.gradient_reduce_ns, 0);
}

TEST(JobTime, ModelFlopsAreSixPerWeightAndHalfTheSquareOfScores) {
  const JobTime time = job_time(job_of(1, 3), system(), {});
  // Per layer: qkv 1024 * 1536, proj 1024^2, fc1 1024 * 8192, fc2 4096 * 1024; head 1024 * 32000.
  // Attention: 6 * (1024 + 1024) * 1024 keys on average.
  const double weights =
      8 * (1024.0 * 1536 + 1024.0 * 1024 + 1024.0 * 8192 + 4096.0 * 1024) + 1024.0 * 32000;
  const double expected = 3 * 2048.0 * (6 * weights + 8 * 6 * 2048.0 * 1024);
  EXPECT_DOUBLE_EQ(time.model_flops, expected);
  const double seconds = static_cast<double>(time.iteration_ns) / 1e9;
  EXPECT_DOUBLE_EQ(time.mfu_fraction, expected / seconds / 2250e12);
  EXPECT_DOUBLE_EQ(time.tokens_per_s, 3 * 2048 / seconds);
}

TEST(JobTime, DoesNotCountRecomputedWorkAsModelFlops) {
  Job job = job_of(1, 3);
  const JobTime plain = job_time(job, system(), {});
  job.recompute.granularity = RecomputeGranularity::kFull;
  const JobTime full = job_time(job, system(), {});
  EXPECT_DOUBLE_EQ(full.model_flops, plain.model_flops);
  EXPECT_EQ(full.iteration_ns - plain.iteration_ns, full.recompute_ns);
  job.recompute.block = true;
  job.recompute.layers = 2;  // two of eight layers
  EXPECT_NEAR(static_cast<double>(job_time(job, system(), {}).recompute_ns),
              static_cast<double>(full.recompute_ns) / 4, 10);
}

TEST(JobTime, OffloadCostsOnlyWhatThePassesCannotHide) {
  Job job = job_of(4, 16);
  SystemSpec fast = system();
  fast.copy_hidden_fraction = 1;
  job.offload.modules = {"all"};
  job.offload.fraction = 0.05;
  const JobTime hidden = job_time(job, fast, {});
  EXPECT_GT(hidden.stages[0].offload_bytes, 0);
  EXPECT_EQ(hidden.exposed_offload_ns, 0);
  job.offload.fraction = 1;
  fast.d2h_bytes_per_s = 1e9;
  EXPECT_GT(job_time(job, fast, {}).exposed_offload_ns, 0);
}

TEST(JobTime, GradientSumsHideBehindTheBackwardIfTold) {
  Job job = job_of(1, 2);
  job.layout.world_size = 8;
  job.optimizer.distributed = true;
  const JobTime exposed = job_time(job, system(), {});
  job.overlap_grad_reduce = job.overlap_param_gather = true;
  const JobTime overlapped = job_time(job, system(), {});
  EXPECT_LT(overlapped.gradient_reduce_ns, exposed.gradient_reduce_ns);
  EXPECT_LT(overlapped.parameter_gather_ns, exposed.parameter_gather_ns);
  EXPECT_EQ(overlapped.pipeline_ns, exposed.pipeline_ns);
}

TEST(JobTime, LoadMakesMoeLayersSlowerByLayerOrAsAWhole) {
  const Job job = moe_job(2, 8);
  const JobTime calm = job_time(job, system(), {});
  const JobTime hot = job_time(job, system(), {.factor = 2});
  EXPECT_GT(hot.pipeline_ns, calm.pipeline_ns);
  RoutedLoads by_layer;
  by_layer.by_layer.assign(8, 2.0);
  EXPECT_EQ(job_time(job, system(), by_layer).pipeline_ns, hot.pipeline_ns);
  by_layer.by_layer[7] = 1.0;
  const int64_t mixed = job_time(job, system(), by_layer).pipeline_ns;
  EXPECT_LE(mixed, hot.pipeline_ns);
  EXPECT_GT(mixed, calm.pipeline_ns);
}

TEST(JobTime, SpikedMicrobatchCostsMoreThanNothingAndLessThanAHotStep) {
  const Job job = moe_job(2, 8);
  const int64_t calm = job_time(job, system(), {}).pipeline_ns;
  const int64_t hot = job_time(job, system(), {.factor = 3}).pipeline_ns;
  RoutedLoads loads;
  loads.spikes = {{4, 3.0}};
  const int64_t spiked = job_time(job, system(), loads).pipeline_ns;
  EXPECT_GT(spiked, calm);
  EXPECT_LT(spiked, hot);
  loads.spikes = {{4, 1.0}};
  EXPECT_EQ(job_time(job, system(), loads).pipeline_ns, calm);
}

TEST(JobTime, EveryOrderHasATime) {
  for (const PipelineKind kind :
       {PipelineKind::k1F1B, PipelineKind::kInterleaved, PipelineKind::kZbH1, PipelineKind::kZbH2,
        PipelineKind::kZbV, PipelineKind::kVHalf, PipelineKind::kDualPipe,
        PipelineKind::kDualPipeV}) {
    Job job = job_of(4, 16);
    job.pipeline = kind;
    const bool two = is_v_shaped(kind) || kind == PipelineKind::kInterleaved;
    if (two) job.layout.vpp = 2;
    job.stages = default_stages(job.model, 4, two ? 2 : 1);
    validate(job, "job");
    const JobTime time = job_time(job, system(), {});
    EXPECT_GT(time.pipeline_ns, 0) << pipeline_kind_name(kind);
    EXPECT_GE(time.bubble_ns, 0) << pipeline_kind_name(kind);
    EXPECT_GT(time.mfu_fraction, 0.01) << pipeline_kind_name(kind);
    EXPECT_LT(time.mfu_fraction, 1) << pipeline_kind_name(kind);
  }
}

}  // namespace
}  // namespace bagualu
