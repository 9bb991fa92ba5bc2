#include "bagualu/model/megatron_args.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// A script as Megatron's examples are written: arrays, variables, torchrun.
constexpr const char* kScript = R"(#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"4"}
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
)
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336   # of each expert
    --num-attention-heads 32
    --seq-length 4096
    --max-position-embeddings 32768
    --normalization RMSNorm
    --position-embedding-type rope
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --group-query-attention
    --num-query-groups 8
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --no-masked-softmax-fusion
)
MOE_ARGS="--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2"
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 256
    --lr 1e-4
    --bf16
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --moe-token-dispatcher-type alltoall
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8
    --sequence-parallel
)
if [ -n "${WANDB_API_KEY}" ]; then
    TRAINING_ARGS+=(--wandb-project ${WANDB_PROJECT:-"Mixtral"})
fi
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    $MOE_ARGS ${TRAINING_ARGS[@]} 2>&1 | tee log
)";

TEST(MegatronArgs, LaunchScriptBecomesAJob) {
  const MegatronJob read = parse_megatron_args(kScript, "sh", "train.sh", {.vocab = 32000});
  const Job& job = read.job;
  EXPECT_EQ(job.layout.world_size, 32);  // 4 nodes of 8
  EXPECT_EQ(layout_text(job.layout), "tp=1,cp=1,pp=4,vpp=1,ep=8,etp=1,dp=8");
  EXPECT_EQ(stages_text(job.stages), "Et*8|t*8|t*8|t*8L");
  EXPECT_EQ(job.microbatches, 32);  // 256 / (1 * 8)
  EXPECT_EQ(job.model.experts, 8);
  EXPECT_EQ(job.model.expert_ffn, 14336);  // no --moe-ffn-hidden-size
  EXPECT_EQ(job.model.dense_ffn, 0);
  EXPECT_EQ(job.model.kv_heads, 8);
  EXPECT_EQ(job.model.head_dim, 128);
  EXPECT_EQ(job.model.vocab, 32000);
  EXPECT_FALSE(job.model.layer_norm);
  EXPECT_EQ(job.model.aux_loss_coef, 0.01);
  EXPECT_TRUE(job.optimizer.distributed);
  EXPECT_EQ(job.optimizer.gradient_bytes, 4);
  EXPECT_EQ(job.moe.dispatcher, "alltoall");
  EXPECT_FALSE(job.layout.sequence_parallel);
  EXPECT_THAT(read.unmodelled, IsEmpty());
  EXPECT_THAT(read.ignored,
              ElementsAre("--sequence-parallel (off, as tensor-model-parallel-size is 1)",
                          "--no-masked-softmax-fusion", "--moe-grouped-gemm", "--lr 1e-4"));
}

TEST(MegatronArgs, CallerSaysTheWorldAndTheVariables) {
  const MegatronJob wide =
      parse_megatron_args(kScript, "sh", "train.sh", {.world_size = 64, .vocab = 32000});
  EXPECT_EQ(wide.job.layout.dp(), 16);
  const MegatronJob named = parse_megatron_args(
      kScript, "sh", "train.sh", {.vocab = 32000, .variables = {{"SLURM_NNODES", "8"}}});
  EXPECT_EQ(named.job.layout.world_size, 64);
}

constexpr const char* kSmall =
    "--num-layers 4\n--hidden-size 512 --num-attention-heads 8\n--seq-length 1024 "
    "--max-position-embeddings 1024\n# half a comment\n--vocab-size 50257 --micro-batch-size 4 "
    "--bf16\n";

MegatronJob small(const std::string& more, int64_t world_size = 8) {
  return parse_megatron_args(kSmall + more, "txt", "args.txt", {.world_size = world_size});
}

TEST(MegatronArgs, PlainListAndDefaultsOfGpt) {
  const Job job = small("").job;
  EXPECT_EQ(job.model.experts, 0);
  EXPECT_EQ(job.model.dense_ffn, 2048);  // 4 h without --swiglu
  EXPECT_EQ(job.model.learned_positions, 1024);
  EXPECT_TRUE(job.model.layer_norm);
  EXPECT_TRUE(job.model.tied_embeddings);
  EXPECT_TRUE(job.model.qkv_bias && job.model.attn_out_bias && job.model.mlp_bias);
  EXPECT_FALSE(job.model.gated_mlp);
  EXPECT_EQ(job.model.dropout, 0.1);
  EXPECT_EQ(job.attention_dropout, 0.1);
  EXPECT_EQ(job.padded_vocab(), 50304);  // 393 * 128
  EXPECT_EQ(job.microbatches, 1);        // no --global-batch-size
  // Two thirds of 4 h, down to a multiple of 64: 1365 -> 1344.
  EXPECT_EQ(small("--swiglu").job.model.dense_ffn, 1344);
}

TEST(MegatronArgs, YamlOfFunctionalTestsAndOfRecipes) {
  const std::string functional =
      "ENV_VARS:\n  A: 1\nMODEL_ARGS:\n  --num-layers: 4 # four\n  --hidden-size: 512\n"
      "  --num-attention-heads: 8\n  --seq-length: 1024\n  --max-position-embeddings: 1024\n"
      "  --micro-batch-size: 4\n  --swiglu: true\n  --bf16: true\n  --fp16: false\n"
      "  --recompute-granularity: selective\n  --recompute-modules: \"[core_attn mlp]\"\n"
      "  --data-path: ${DATA_PATH}/x\nTEST_TYPE: regular\n";
  const MegatronOptions options = {.world_size = 8, .vocab = 50257};
  const MegatronJob read = parse_megatron_args(functional, "yaml", "model_config.yaml", options);
  EXPECT_THAT(read.job.recompute.modules, ElementsAre("core_attn", "mlp"));
  EXPECT_THAT(read.ignored, ElementsAre("--data-path ${DATA_PATH}/x"));

  const std::string recipe =
      "base: &base\n  num_layers: 8\n  bf16: true\nARGS:\n  <<: *base\n  num_layers: 4\n"
      "  hidden_size: 512\n  num_attention_heads: 8\n  seq_length: 1024\n"
      "  max_position_embeddings: 1024\n  micro_batch_size: 4\n  swiglu: true\n"
      "  add_bias_linear: false\n  recompute_granularity: selective\n"
      "  recompute_modules:\n  - core_attn\n  - mlp\n";
  const Job job = parse_megatron_args(recipe, "yaml", "recipe.yaml", options).job;
  EXPECT_EQ(job.model.layers, 4);
  EXPECT_FALSE(job.model.mlp_bias);
  EXPECT_THAT(job.recompute.modules, ElementsAre("core_attn", "mlp"));

  const std::string list =
      "- --num-layers 4\n- --hidden-size\n- 512\n- --num-attention-heads 8\n"
      "- --seq-length 1024 --max-position-embeddings 1024\n"
      "- --micro-batch-size=4\n- --bf16\n";
  EXPECT_EQ(parse_megatron_args(list, "yml", "list.yml", options).job.model.layers, 4);
}

std::vector<int64_t> moe_layers(const MegatronJob& read) {
  return {read.job.model.moe_layer.begin(), read.job.model.moe_layer.end()};
}

TEST(MegatronArgs, ExpertLayersByFrequencyAndPattern) {
  const std::string moe = "--num-experts 8 --moe-ffn-hidden-size 256 ";
  EXPECT_THAT(moe_layers(small(moe)), ElementsAre(1, 1, 1, 1));
  EXPECT_THAT(moe_layers(small(moe + "--moe-layer-freq 2")), ElementsAre(1, 0, 1, 0));
  EXPECT_THAT(moe_layers(small(moe + "--moe-layer-freq \"([0]*1+[1]*3)\"")),
              ElementsAre(0, 1, 1, 1));
  EXPECT_THAT(moe_layers(small(moe + "--moe-layer-freq '[0,1]*2'")), ElementsAre(0, 1, 0, 1));
  EXPECT_THROW(small(moe + "--moe-layer-freq '[0]*1+[1]*4'"), InvalidInput);  // five of four
  EXPECT_THROW(small(moe + "--moe-layer-freq '[1]*4-[1]'"), InvalidInput);
}

TEST(MegatronArgs, StagesAsMegatronSpreadsThem) {
  const auto stages = [](const std::string& more) { return stages_text(small(more).job.stages); };
  EXPECT_EQ(stages("--pipeline-model-parallel-size 2"), "Et*2|t*2L");
  EXPECT_EQ(stages("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
                   "--global-batch-size 32"),
            "Et|t|t|tL");
  EXPECT_EQ(stages("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"),
            "Et|t*3L");
  // Embedding and loss take a layer's place each: (10 + 2) / 4 = 3.
  EXPECT_EQ(stages("--num-layers 10 --pipeline-model-parallel-size 4 "
                   "--account-for-embedding-in-pipeline-split "
                   "--account-for-loss-in-pipeline-split"),
            "Et*2|t*3|t*3|t*2L");
  EXPECT_EQ(stages("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "
                   "\"Et*2|(t|)*2L\" --global-batch-size 32"),
            "Et*2|t|t|L");
  const MegatronJob written = small(
      "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*2|t|t|L' "
      "--global-batch-size 32");
  EXPECT_EQ(written.job.layout.vpp, 2);
  EXPECT_EQ(written.job.pipeline, PipelineKind::kInterleaved);
}

TEST(MegatronArgs, ExpertTensorParallelismIsThatOfTheRestUnlessSaid) {
  const std::string moe =
      "--num-experts 8 --moe-ffn-hidden-size 256 --disable-bias-linear "
      "--tensor-model-parallel-size 2 --sequence-parallel ";
  EXPECT_EQ(small(moe).job.layout.etp, 2);
  EXPECT_EQ(small(moe + "--expert-tensor-parallel-size 1").job.layout.etp, 1);
}

TEST(MegatronArgs, OptimizerBytesByPrecision) {
  const auto optimizer = [](const std::string& more) { return small(more).job.optimizer; };
  const OptimizerSettings plain = optimizer("");
  EXPECT_EQ(plain.master_bytes, 4);
  EXPECT_EQ(plain.main_gradient_bytes, 0);
  const OptimizerSettings narrow = optimizer("--grad-reduce-in-bf16");
  EXPECT_EQ(narrow.gradient_bytes, 2);
  EXPECT_EQ(narrow.main_gradient_bytes, 4);  // cast for the masters' step
  const OptimizerSettings aware = optimizer(
      "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 "
      "--exp-avg-sq-dtype fp8 --main-grads-dtype bf16");
  EXPECT_EQ(aware.master_bytes, 2);  // the 16 bits that bf16 parameters lack
  EXPECT_EQ(aware.exp_avg_bytes, 2);
  EXPECT_EQ(aware.exp_avg_sq_bytes, 1);
  EXPECT_EQ(aware.main_gradient_bytes, 0);
  const OptimizerSettings sgd = optimizer("--optimizer sgd --sgd-momentum 0");
  EXPECT_EQ(sgd.exp_avg_bytes + sgd.exp_avg_sq_bytes, 0);
  EXPECT_THAT(small("--optimizer muon").unmodelled, ElementsAre("--optimizer muon"));
}

TEST(MegatronArgs, UnmodelledFlagsAreReportedUnlessTheySayNothing) {
  EXPECT_THAT(small("--cuda-graph-impl local --cuda-graph-warmup-steps 3").unmodelled,
              ElementsAre("--cuda-graph-impl local"));
  EXPECT_THAT(small("--cuda-graph-impl none --cpu-offloading-num-layers 0").unmodelled, IsEmpty());
  EXPECT_THAT(small("--use-megatron-fsdp --fp32-residual-connection").unmodelled,
              ElementsAre("--use-megatron-fsdp", "--fp32-residual-connection"));
  EXPECT_THAT(small("--attention-backend unfused --no-masked-softmax-fusion").unmodelled,
              ElementsAre("--no-masked-softmax-fusion"));
}

struct Refusal {
  const char* more;
  const char* field;
  const char* allowed;
};

TEST(MegatronArgs, RefusalsNameTheFlagAndTheRemedy) {
  const std::vector<Refusal> refusals = {
      {"--num-layer 4", "--num-layer", "nearest is --num-layers"},
      {"--batch-size 4", "--batch-size", "--micro-batch-size"},
      {"--num-layers many", "--num-layers", "an integer from 1"},
      {"--swiglu yes", "--swiglu", "it is a switch"},
      {"--num-layers", "--num-layers", "one value"},
      {"--num-layers 4 5", "--num-layers", "one value"},
      {"--normalization Batch", "--normalization", "LayerNorm, RMSNorm"},
      {"--moe-router-topk 2", "--moe-router-topk", "only beside --num-experts"},
      {"--expert-model-parallel-size 2", "--expert-model-parallel-size", "--num-experts"},
      {"--pipeline-model-parallel-size 3", "--world_size", "multiple of"},
      {"--pipeline-model-parallel-size 8", "--num-layers", "--pipeline-model-parallel-layout"},
      {"--global-batch-size 31", "--global-batch-size", "a multiple of"},
      {"--num-query-groups 2", "--num-query-groups", "--group-query-attention"},
      {"--kv-lora-rank 64", "--kv-lora-rank", "--multi-latent-attention"},
      {"--exp-avg-dtype bf16", "--exp-avg-dtype", "--use-precision-aware-optimizer"},
      {"--max-position-embeddings 512", "--max-position-embeddings", "at least --seq-length"},
      {"--fp8-param-gather", "--fp8-param-gather", "--fp8-format"},
      {"--recompute-method block", "--recompute-method", "--recompute-granularity full"},
      {"--recompute-granularity full", "--recompute-method", "uniform or block"}};
  for (const Refusal& refusal : refusals) {
    try {
      small(refusal.more);
      ADD_FAILURE() << refusal.more;
    } catch (const InvalidInput& error) {
      EXPECT_EQ(error.where(), "args.txt");
      EXPECT_EQ(error.field(), refusal.field) << refusal.more;
      EXPECT_THAT(error.allowed(), HasSubstr(refusal.allowed)) << refusal.more;
    }
  }
}

TEST(MegatronArgs, ScriptsWithoutArgumentsOrWithDoubtAreRefused) {
  EXPECT_THROW(parse_megatron_args("echo hello\n", "sh", "a.sh"), InvalidInput);
  const std::string doubtful =
      "if [ -f x ]; then L=4; fi\npython pretrain_gpt.py --num-layers $L\n";
  try {
    parse_megatron_args(doubtful, "sh", "a.sh");
    FAIL();
  } catch (const InvalidInput& error) {
    EXPECT_EQ(error.field(), "line 2");
    EXPECT_THAT(error.found(), HasSubstr("${L}, set at line 1"));
  }
  EXPECT_THROW(parse_megatron_args(kScript, "sh", "a.sh"), InvalidInput);  // no vocabulary
  EXPECT_THROW(read_megatron_args("/nowhere/a.sh"), InvalidInput);
}

TEST(MegatronArgs, CommandInsideAQuotedStringIsFound) {
  const std::string script =
      "OPTS=\" --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
      "--max-position-embeddings 1024 --vocab-size 1024 --micro-batch-size 1 --bf16\"\n"
      "CMD=\"cd /work && python -u /x/pretrain_gpt.py ${OPTS}\"\n"
      "srun -l sh -c \"${CMD}\"\n";
  EXPECT_EQ(parse_megatron_args(script, "sh", "a.sh", {.world_size = 8}).job.model.layers, 4);
}

/// Every row of tests/data/megatron_ci_memory.json reads, or is refused for the reason said here.
TEST(MegatronArgs, FunctionalTestsOfMegatronRead) {
  const Json data =
      read_json_file(std::string(BAGUALU_SOURCE_DIR) + "/tests/data/megatron_ci_memory.json");
  const std::map<std::string, std::string> refused = {
      // Groups of 5 micro-batches, not of the 4 pipeline ranks.
      {"gpt/gpt3_mcore_te_tp1_pp4_vp1_tunable_overlap/dev_dgx_h100", "microbatches"},
      // Its tokenizer is not public.
      {"nemotron/nemotron3_super_release_gb200/dev_dgx_gb200", "--vocab-size"}};
  int64_t read = 0;
  for (const Json& row : data["rows"]) {
    const std::string id = row["id"];
    MegatronOptions options;
    // Release tests do not say their number of GPUs; their layouts fit 128.
    const int64_t unsaid = id.find("release") == std::string::npos ? 8 : 128;
    options.world_size = row["world_size"].is_null() ? unsaid : row["world_size"].get<int64_t>();
    options.vocab = row["vocab"].is_null() ? 0 : row["vocab"].get<int64_t>();
    try {
      const MegatronJob job = megatron_job_from_json(row["args"], id, options);
      EXPECT_EQ(job.job.model.has_moe(), row["moe"].get<bool>()) << id;
      ++read;
    } catch (const InvalidInput& error) {
      ASSERT_TRUE(refused.contains(id)) << error.what();
      EXPECT_EQ(error.field(), refused.at(id));
    }
  }
  EXPECT_EQ(read, 64);
}

}  // namespace
}  // namespace bagualu
