#include "bagualu/model/megatron_flags.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "bagualu/base/error.h"
#include "bagualu/model/megatron_args.h"
#include "bagualu/model/megatron_known.h"

namespace bagualu {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Jobs that Megatron's flags can express, drawn with a seed.
class RandomJob {
 public:
  explicit RandomJob(unsigned seed) : random_(seed) {}

  Job draw() {
    Job job;
    job.element_bytes = chance(90) ? 2 : 4;
    draw_layout(&job);
    draw_model(&job);
    draw_stages(&job);
    draw_batches(&job);
    draw_precision(&job);
    draw_optimizer(&job);
    draw_recompute(&job);
    draw_offload(&job);
    draw_moe(&job);
    draw_overlap(&job);
    return job;
  }

 private:
  bool chance(int percent) { return static_cast<int>(random_() % 100) < percent; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return *(values.begin() + static_cast<int64_t>(random_() % values.size()));
  }
  std::vector<std::string> some_of(std::vector<std::string> values) {
    std::erase_if(values, [&](const std::string&) { return !chance(40); });
    return values;
  }

  void draw_layout(Job* job) {
    JobLayout& l = job->layout;
    l.tp = pick<int64_t>({1, 1, 2, 4, 8});
    l.cp = pick<int64_t>({1, 1, 1, 2});
    l.pp = pick<int64_t>({1, 2, 4, 8});
    l.vpp = l.pp > 1 ? pick<int64_t>({1, 1, 2, 3}) : 1;
    l.world_size = l.tp * l.cp * l.pp * pick<int64_t>({1, 2, 4, 8, 16});
    l.sequence_parallel = l.tp > 1;
  }

  void draw_model(Job* job) {
    ModelSpec& m = job->model;
    m.family = "megatron";
    m.layers = job->layout.pp * job->layout.vpp * pick<int64_t>({1, 2, 3});
    m.hidden = pick<int64_t>({512, 1024, 2880, 7168});
    m.heads = pick<int64_t>({8, 16, 64});
    m.vocab = pick<int64_t>({50257, 128256, 129280});
    job->vocab_multiple = pick<int64_t>({64, 128, 3232});
    job->seq = pick<int64_t>({1024, 4096, 8192});
    m.gated_mlp = chance(70);
    m.layer_norm = chance(30);
    m.tied_embeddings = chance(30);
    m.rms_eps = pick({1e-5, 1e-6});
    m.rope_theta = pick({1e4, 1e6});
    m.dropout = pick({0.0, 0.1});
    m.attn_out_bias = m.mlp_bias = chance(25);
    m.attn_sinks = chance(10);
    if (chance(15)) m.learned_positions = job->seq * pick<int64_t>({1, 2});
    if (m.learned_positions == 0 && chance(30)) m.mtp_layers = pick<int64_t>({1, 2});
    draw_attention(&m);
    draw_experts(job);
  }

  void draw_attention(ModelSpec* m) {
    if (chance(35)) {
      m->q_lora_rank = pick<int64_t>({0, 256, 1536});
      m->kv_lora_rank = pick<int64_t>({128, 512});
      m->qk_nope_head_dim = 128;
      m->qk_rope_head_dim = pick<int64_t>({32, 64});
      m->v_head_dim = 128;
      m->head_dim = m->qk_nope_head_dim + m->qk_rope_head_dim;
      m->kv_heads = m->heads;
    } else {
      m->head_dim = pick<int64_t>({64, 72, 128});
      m->kv_heads = pick<int64_t>({2, 8, m->heads});
      m->qkv_bias = m->attn_out_bias || chance(20);
      m->qk_norm = chance(40);
      m->qk_norm_weightless = m->qk_norm && chance(20);
    }
    if (!chance(20)) return;
    m->attention_window = pick<int64_t>({128, 4096});
    m->windowed_layer.assign(static_cast<size_t>(m->layers), 1);
    for (uint8_t& windowed : m->windowed_layer) windowed = chance(60) ? 1 : 0;
  }

  void draw_experts(Job* job) {
    ModelSpec& m = job->model;
    JobLayout& l = job->layout;
    m.moe_layer.assign(static_cast<size_t>(m.layers), 0);
    if (chance(25)) {
      m.dense_ffn = 8192;
      if (chance(30)) l.sequence_parallel = false;
      return;
    }
    m.experts = pick<int64_t>({8, 64, 256});
    m.top_k = pick<int64_t>({1, 2, 8});
    m.expert_ffn = pick<int64_t>({1024, 2048});
    for (uint8_t& moe : m.moe_layer) moe = chance(80) ? 1 : 0;
    m.moe_layer.back() = 1;
    if (m.moe_layers() < m.layers) m.dense_ffn = 16384;
    if (!m.mlp_bias && chance(50)) m.shared_ffn = 2048;
    m.shared_gate = m.shared_ffn > 0 && chance(20);
    m.norm_topk_prob = chance(60);
    if (m.norm_topk_prob && chance(50)) m.router_bias_rate = 1e-3;
    m.aux_loss_coef = pick({0.0, 1e-4, 0.01});
    m.z_loss_coef = pick({0.0, 1e-3});
    const int64_t of_stage = l.world_size / l.pp;
    l.ep = of_stage >= 8 ? pick<int64_t>({1, 2, 8}) : 1;
    if (!m.mlp_bias && of_stage % (l.ep * 2) == 0) l.etp = pick<int64_t>({1, 2});
  }

  void draw_stages(Job* job) {
    const JobLayout& l = job->layout;
    job->pipeline = l.vpp > 1 ? PipelineKind::kInterleaved : PipelineKind::k1F1B;
    const int64_t count = l.pp * l.vpp;
    int64_t first = 0;
    for (int64_t s = 0; s < count; ++s) {
      job->stages.push_back({.first_layer = first, .layer_count = job->model.layers / count});
      first += job->stages.back().layer_count;
    }
    job->stages.front().embedding = true;
    job->stages.back().head = true;
    job->stages.back().mtp_layers = job->model.mtp_layers;
    if (count < 3 || !chance(40)) return;
    // A layer less in the last stage, one more in the second.
    --job->stages.back().layer_count;
    ++job->stages[1].layer_count;
    for (size_t s = 2; s < job->stages.size(); ++s) ++job->stages[s].first_layer;
  }

  void draw_batches(Job* job) {
    job->micro_batch_size = pick<int64_t>({1, 2, 4});
    job->microbatches = job->layout.pp * pick<int64_t>({1, 2, 8});
  }

  void draw_precision(Job* job) {
    job->attention_unfused = job->element_bytes == 4 || chance(20);
    job->attention_dropout = pick({0.0, 0.1});
    job->fp8 = job->element_bytes == 2 && chance(40);
    if (job->fp8) {
      job->fp8_recipe = pick<std::string>({"delayed", "tensorwise", "blockwise", "mxfp8"});
    }
    job->accumulation_fusion = chance(70);
    job->activation_fusion = !job->model.gated_mlp || chance(70);
    job->cross_entropy =
        pick({CrossEntropy::kUnfused, CrossEntropy::kFusedNative, CrossEntropy::kFusedTe});
    if (job->layout.cp > 1) {
      job->cp_exchange = pick({CpExchange::kRing, CpExchange::kAllToAll, CpExchange::kAllGather});
    }
  }

  void draw_optimizer(Job* job) {
    OptimizerSettings& o = job->optimizer;
    const bool half = job->element_bytes == 2;
    o.distributed = chance(70);
    o.parameter_bytes = job->fp8 && o.distributed && chance(50) ? 1 : job->element_bytes;
    o.gradient_bytes = half && chance(30) ? 2 : 4;
    o.main_gradient_bytes = o.gradient_bytes == 2 ? 4 : 0;
    o.master_bytes = half ? 4 : 0;
    if (job->layout.dp() % 2 == 0 && chance(20)) o.instances = 2;
    job->overlap_grad_reduce = chance(60);
    job->overlap_param_gather = job->overlap_grad_reduce && o.distributed && chance(60);
    if (chance(10)) {
      o.name = "sgd";
      o.exp_avg_bytes = pick<int64_t>({0, 4});
      o.exp_avg_sq_bytes = 0;
    } else if (o.distributed && half && chance(50)) {
      const bool by_kernel = !job->fp8 || job->fp8_recipe == "delayed";
      o.master_bytes = by_kernel ? 2 : pick<int64_t>({2, 4});
      o.main_gradient_bytes = o.gradient_bytes == 2 && o.master_bytes == 4 ? 4 : 0;
      o.exp_avg_bytes = pick<int64_t>({1, 2, 4});
      o.exp_avg_sq_bytes = pick<int64_t>({1, 2, 4});
    }
  }

  void draw_recompute(Job* job) {
    RecomputeSettings& r = job->recompute;
    if (chance(30)) return;
    if (chance(40)) {
      r.granularity = RecomputeGranularity::kFull;
      r.block = chance(50);
      r.layers = pick<int64_t>({1, 2});
      r.distribute_saved = job->layout.tp > 1 && !job->layout.sequence_parallel && chance(50);
      return;
    }
    std::vector<std::string> modules = {"core_attn"};
    if (job->model.moe_layers() < job->model.layers) modules.push_back("mlp");
    if (job->model.has_moe()) modules.push_back("moe");
    if (job->model.shared_ffn > 0) modules.push_back("shared_experts");
    if (job->model.has_mla()) modules.push_back("mla_up_proj");
    if (!job->fp8 || job->fp8_recipe != "delayed") {
      modules.push_back("layernorm");
      if (job->model.has_moe()) modules.push_back("moe_act");
    }
    r.modules = some_of(modules);
    if (r.modules.empty()) r.modules = {"core_attn"};
    r.granularity = RecomputeGranularity::kSelective;
  }

  static bool among(const std::vector<std::string>& words, const char* word) {
    return std::find(words.begin(), words.end(), word) != words.end();
  }

  void draw_offload(Job* job) {
    OffloadSettings& o = job->offload;
    if (chance(50)) return;
    std::vector<std::string> modules = {"attn_norm", "mlp_norm", "qkv_linear", "core_attn"};
    if (job->model.has_moe() && !among(job->recompute.modules, "moe")) {
      modules.insert(modules.end(), {"expert_fc1", "moe_act"});
    }
    o.modules = some_of(modules);
    if (among(o.modules, "core_attn") && chance(50)) o.modules.push_back("attn_proj");
    if (o.modules.empty()) return;
    o.fraction = pick({1.0, 0.5, 0.25});
    o.min_tensor_elements = pick<int64_t>({1 << 20, 1 << 10});
  }

  void draw_moe(Job* job) {
    if (!job->model.has_moe()) return;
    MoeSettings& moe = job->moe;
    moe.dispatcher = pick<std::string>({"allgather", "alltoall", "flex"});
    if (moe.dispatcher == "flex") {
      moe.flex_backend = pick<std::string>({"deepep", "hybridep", "ncclep"});
    }
    if (chance(30)) moe.capacity_factor = pick({1.0, 1.25, 8.0});
    moe.pad_to_capacity = moe.capacity_factor > 0 && chance(50) &&
                          (moe.dispatcher != "flex" || moe.flex_backend != "deepep");
    moe.permute_fusion = chance(50);
    moe.router_bytes = pick<int64_t>({job->element_bytes, 4, 8});
    if (job->fp8) moe.row_multiple = job->fp8_recipe == "mxfp8" ? 32 : 16;
  }

  void draw_overlap(Job* job) {
    OverlapSettings& o = job->overlap;
    o.tp = job->layout.sequence_parallel && chance(30);
    o.p2p = !(job->pipeline == PipelineKind::kInterleaved && job->layout.pp > 2 && chance(30));
    const bool exchange = job->model.has_moe() && job->moe.dispatcher != "allgather";
    o.shared_expert = exchange && !among(job->recompute.modules, "shared_experts") && chance(30);
    const bool staged = job->layout.pp == 1 || job->layout.vpp > 1;
    o.expert = exchange && !o.shared_expert && staged && job->layout.ep > 1 &&
               job->element_bytes == 2 && job->model.mtp_layers <= 1 &&
               job->recompute.granularity != RecomputeGranularity::kFull &&
               !among(job->recompute.modules, "moe") && chance(60);
  }

  std::mt19937 random_;
};

std::string flags_line(const std::vector<std::string>& flags) {
  return fmt::format("{}", fmt::join(flags, " "));
}

TEST(MegatronFlags, TwoHundredRandomJobsReadBackTheSame) {
  std::set<std::string> used;
  for (unsigned seed = 0; seed < 200; ++seed) {
    const Job job = RandomJob(seed).draw();
    std::vector<std::string> flags;
    ASSERT_NO_THROW(flags = megatron_flags(job, fmt::format("seed {}", seed)));
    const MegatronJob back =
        megatron_job_from_words(flags, "flags", {.world_size = job.layout.world_size});
    EXPECT_EQ(back.job, job) << "seed " << seed << ": " << flags_line(flags);
    EXPECT_THAT(back.unmodelled, IsEmpty());
    EXPECT_THAT(check_exclusions(flags), IsEmpty()) << seed << ": " << flags_line(flags);
    for (const std::string& word : flags) {
      if (word.starts_with("--")) used.insert(word);
    }
  }
  // The draw reaches the writer's branches: 86 different flags were seen on 2026-11-30.
  EXPECT_GE(used.size(), 80u);
}

TEST(MegatronFlags, EveryFlagWrittenIsOneOfMegatrons) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    for (const std::string& word : megatron_flags(RandomJob(seed).draw())) {
      if (!word.starts_with("--")) continue;
      EXPECT_NE(known_megatron_flag(word.substr(2)).kind, MegatronFlagKind::kUnknown) << word;
    }
  }
}

TEST(MegatronFlags, TextIsAnArrayThatReadsBack) {
  const Job job = RandomJob(3).draw();
  const std::string text = megatron_flags_text(job);
  EXPECT_TRUE(text.starts_with("MEGATRON_ARGS=(\n    --num-layers ")) << text;
  const MegatronJob back =
      parse_megatron_args(text, "sh", "text", {.world_size = job.layout.world_size});
  EXPECT_EQ(back.job, job);
}

/// A small job that every flag below can be put to.
Job plain_job() {
  Job job;
  job.model.family = "megatron";
  job.model.layers = 4;
  job.model.hidden = 512;
  job.model.heads = 8;
  job.model.kv_heads = 8;
  job.model.head_dim = 64;
  job.model.vocab = 1024;
  job.model.experts = 8;
  job.model.top_k = 2;
  job.model.expert_ffn = 1024;
  job.model.moe_layer = {1, 1, 1, 1};
  job.layout = {.world_size = 8, .pp = 2};
  job.seq = 1024;
  job.stages = default_stages(job.model, 2, 1);
  job.microbatches = 4;
  return job;
}

std::string refused_field(const Job& job) {
  try {
    megatron_flags(job);
  } catch (const InvalidInput& error) {
    return error.field();
  }
  return "";
}

TEST(MegatronFlags, OrdersWithoutAFlagAreRefused) {
  EXPECT_EQ(refused_field(plain_job()), "");
  for (const PipelineKind kind :
       {PipelineKind::kZbH1, PipelineKind::kZbH2, PipelineKind::kDualPipe, PipelineKind::kZbV,
        PipelineKind::kVHalf, PipelineKind::kDualPipeV}) {
    Job job = plain_job();
    job.pipeline = kind;
    job.stages = default_stages(job.model, 2, is_v_shaped(kind) ? 2 : 1);
    try {
      megatron_flags(job);
      FAIL() << pipeline_kind_name(kind);
    } catch (const InvalidInput& error) {
      EXPECT_EQ(error.field(), "pipeline");
      EXPECT_THAT(error.allowed(), HasSubstr("Megatron has no flag"));
    }
  }
}

TEST(MegatronFlags, WhatTheRulesExcludeIsRefused) {
  Job offload = plain_job();
  offload.offload.modules = {"attn_proj"};
  EXPECT_EQ(refused_field(offload), "offload.modules");
  Job moe = plain_job();
  moe.recompute = {.granularity = RecomputeGranularity::kSelective, .modules = {"moe"}};
  moe.offload.modules = {"moe_act"};
  EXPECT_EQ(refused_field(moe), "offload.modules");
  Job delayed = plain_job();
  delayed.fp8 = true;
  delayed.moe.row_multiple = 16;
  delayed.recompute = {.granularity = RecomputeGranularity::kSelective, .modules = {"moe_act"}};
  EXPECT_EQ(refused_field(delayed), "recompute.modules");
  delayed.fp8_recipe = "blockwise";
  EXPECT_EQ(refused_field(delayed), "");
  Job states = plain_job();
  states.optimizer.exp_avg_bytes = 2;
  EXPECT_EQ(refused_field(states), "optimizer");
  Job mtp = plain_job();
  mtp.model.mtp_layers = 1;
  mtp.stages[0].mtp_layers = 1;
  EXPECT_EQ(refused_field(mtp), "stages");
}

}  // namespace
}  // namespace bagualu
