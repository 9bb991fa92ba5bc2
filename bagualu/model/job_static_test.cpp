#include "bagualu/model/job_static.h"

#include <gtest/gtest.h>

#include <string>

namespace bagualu {
namespace {

/// Two dense and two MoE layers, hidden 64, 8 experts of width 32, vocabulary 1000.
Job small_job() {
  Job job;
  ModelSpec& m = job.model;
  m.layers = 4;
  m.hidden = 64;
  m.heads = 4;
  m.kv_heads = 4;
  m.head_dim = 16;
  m.vocab = 1000;
  m.dense_ffn = 128;
  m.experts = 8;
  m.top_k = 2;
  m.expert_ffn = 32;
  m.moe_layer = {0, 0, 1, 1};
  job.layout = parse_layout("tp=1,pp=2,ep=4,dp=8", "test", "layout");
  job.stages = default_stages(m, 2, 1);
  job.optimizer.distributed = true;
  job.accumulation_fusion = false;
  job.seq = 128;
  return job;
}

const StaticBucket& bucket(const JobStatic& state, const std::string& name,
                           const std::string& part) {
  for (const StaticBucket& found : state.buckets) {
    if (found.name == name && found.part == part) return found;
  }
  ADD_FAILURE() << name << " " << part;
  return state.buckets.front();
}

// Stage 1: two MoE layers, final norm, head. Attention 4 * 64 * 64 = 16,384 and two norms of 64, a
// router of 8 * 64 = 512: 17,024 per layer. Head 1024 (1000 padded to 128) * 64 = 65,536, norm 64.
// An expert has 3 * 64 * 32 = 6144; two of eight per rank and layer.
TEST(JobStatic, DividesDenseAndExpertStateByTheirOwnGroups) {
  const JobStatic state = job_static(small_job(), 1);
  EXPECT_EQ(state.elements.dense, 2 * 17024 + 65536 + 64);
  EXPECT_EQ(state.elements.expert, 2 * 2 * 6144);
  const StaticBucket& dense = bucket(state, "masters", "dense");
  EXPECT_EQ(dense.divisor, 8);
  EXPECT_EQ(dense.bytes, (2 * 17024 + 65536 + 64) / 8 * 4);
  const StaticBucket& expert = bucket(state, "exp_avg", "expert");
  EXPECT_EQ(expert.divisor, 2) << "16 ranks over pp 2 and ep 4";
  EXPECT_EQ(expert.bytes, 2 * 2 * 6144 / 2 * 4);
  EXPECT_EQ(bucket(state, "gradients", "expert").bytes, 2 * 2 * 6144 * 4) << "never divided";
  EXPECT_EQ(bucket(state, "parameters", "dense").bytes, (2 * 17024 + 65536 + 64) * 2);
}

TEST(JobStatic, TheSumWithoutTheListIsTheListsSum) {
  for (const bool fusion : {false, true}) {
    for (const char* layout : {"tp=2,pp=2,ep=2,dp=4", "tp=4,cp=2,pp=2,ep=4,etp=2,dp=4"}) {
      Job job = small_job();
      job.layout = parse_layout(layout, "test", "layout");
      job.accumulation_fusion = fusion;
      validate(job, "test");
      const ModelParameters parameters = model_parameters(job.model);
      for (const int64_t rank : {0, 1}) {
        EXPECT_EQ(job_static_bytes(job, parameters, rank), job_static(job, rank).bytes());
      }
    }
  }
}

TEST(JobStatic, StateInFewerBytes) {
  Job job = small_job();
  job.optimizer.exp_avg_bytes = 1;
  job.optimizer.exp_avg_sq_bytes = 2;
  const JobStatic state = job_static(job, 0);
  EXPECT_EQ(bucket(state, "exp_avg_sq", "dense").bytes,
            bucket(state, "exp_avg", "dense").bytes * 2);
  job.optimizer.name = "sgd";
  EXPECT_EQ(job_static(job, 0).bytes_of("exp_avg"), 0);
}

// Rank 0 of two has the embedding; tied, the last rank holds it once more.
TEST(JobStatic, TiedEmbeddingsAreHeldTwiceAcrossStages) {
  Job job = small_job();
  const int64_t untied = job_static(job, 1).elements.dense;
  job.model.tied_embeddings = true;
  EXPECT_EQ(job_static(job, 1).elements.dense, untied);
  job.layout = parse_layout("tp=1,pp=1,ep=4,dp=8", "test", "layout");
  job.stages = default_stages(job.model, 1, 1);
  const int64_t once = job_static(job, 0).elements.dense;
  job.model.tied_embeddings = false;
  EXPECT_EQ(job_static(job, 0).elements.dense, once + 65536);
}

// One per shape: qkv [192, 64], proj [64, 64], dense fc1 [256, 64], fc2 [64, 128]. In stage 0 of
// two stages every layer is dense.
TEST(JobStatic, OneStandInPerShapeOfWeight) {
  Job job = small_job();
  job.accumulation_fusion = true;
  EXPECT_EQ(job_static(job, 0).bytes_of("weight_gradient_stand_ins"),
            2 * (192 * 64 + 64 * 64 + 256 * 64 + 64 * 128));
  job.allocator.weight_grad_stand_ins = false;
  EXPECT_EQ(job_static(job, 0).bytes_of("weight_gradient_stand_ins"), 0);
}

// Stage 0: two dense layers of 4 * 64 * 64 + 3 * 64 * 128 weights in GEMMs.
TEST(JobStatic, WeightsExistInFP8Twice) {
  Job job = small_job();
  EXPECT_EQ(job_static(job, 0).bytes_of("fp8_weights"), 0);
  job.fp8 = true;
  EXPECT_EQ(job_static(job, 0).bytes_of("fp8_weights"), 2 * 2 * (4 * 64 * 64 + 3 * 64 * 128));
  job.optimizer.parameter_bytes = 1;
  EXPECT_EQ(job_static(job, 0).bytes_of("fp8_weights"), 0) << "the parameters are those copies";
}

// A rank of DualPipe runs its own stage and its mirror's.
TEST(JobStatic, DualPipeHoldsTwoStages) {
  Job job = small_job();
  job.pipeline = PipelineKind::kDualPipe;
  EXPECT_EQ(stages_held(job, 0), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(job_static(job, 0).elements.dense, job_static(job, 1).elements.dense);
}

}  // namespace
}  // namespace bagualu
