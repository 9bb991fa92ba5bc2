#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "bagualu/base/error.h"
#include "bagualu/model/megatron_args.h"
#include "bagualu/model/megatron_flags.h"

namespace bagualu {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct BrokenRule {
  const char* flags;
  const char* sentence;
};

/// Every rule of check_exclusions, with flags that break it.
constexpr BrokenRule kBrokenRules[] = {
    {"--fine-grained-activation-offloading --offload-modules attn_proj", "needs core_attn"},
    {"--num-experts 8 --recompute-granularity selective --recompute-modules moe "
     "--fine-grained-activation-offloading --offload-modules expert_fc1",
     "recomputing moe excludes"},
    {"--fp8-format hybrid --recompute-granularity selective --recompute-modules layernorm",
     "delayed scaling"},
    {"--cpu-offloading-num-layers 2 --pipeline-model-parallel-size 2", "cpu-offloading"},
    {"--fine-grained-activation-offloading --offload-modules core_attn "
     "--activation-offload-fraction 1.5",
     "between 0 and 1"},
    {"--offload-modules core_attn", "goes with --fine-grained"},
    {"--fine-grained-activation-offloading", "needs a module"},
    {"--recompute-granularity full --recompute-method uniform", "full recomputation needs"},
    {"--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
     "--recompute-modules mlp",
     "excludes modules"},
    {"--recompute-granularity selective --recompute-method block", "need full recomputation"},
    {"--recompute-modules mlp", "needs selective"},
    {"--recompute-granularity selective --recompute-modules mla_up_proj",
     "needs --multi-latent-attention"},
    {"--num-experts 8 --recompute-granularity selective --recompute-modules moe_act",
     "needs --moe-grouped-gemm"},
    {"--distribute-saved-activations --tensor-model-parallel-size 2",
     "--distribute-saved-activations"},
    {"--num-experts 8 --moe-shared-expert-intermediate-size 512 "
     "--recompute-granularity selective --recompute-modules shared_experts "
     "--moe-shared-expert-overlap --moe-token-dispatcher-type alltoall",
     "recomputing shared_experts"},
    {"--num-virtual-stages-per-pipeline-rank 2 --num-layers 4", "more than one pipeline rank"},
    {"--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
     "--num-layers-per-virtual-pipeline-stage 1",
     "at most one of"},
    {"--num-layers 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tL "
     "--account-for-loss-in-pipeline-split",
     "a written layout excludes"},
    {"--num-layers 3 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tL",
     "begins with E"},
    {"--num-layers 2 --mtp-num-layers 1 --pipeline-model-parallel-size 2 "
     "--pipeline-model-parallel-layout Et|mtL --position-embedding-type rope",
     "behind every t"},
    {"--num-layers 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|L",
     "multiple of the pipeline ranks"},
    {"--num-layers 61 --pipeline-model-parallel-size 16", "divide over pipeline ranks"},
    {"--sequence-parallel", "needs tensor parallelism"},
    {"--num-experts 8 --tensor-model-parallel-size 2 --disable-bias-linear",
     "experts with tensor parallelism"},
    {"--num-experts 6 --expert-model-parallel-size 4", "experts divide over"},
    {"--num-experts 8 --expert-tensor-parallel-size 2", "experts with biases"},
    {"--context-parallel-size 2 --seq-length 1026 --max-position-embeddings 2048",
     "multiple of twice"},
    {"--overlap-param-gather --use-distributed-optimizer", "--overlap-param-gather needs"},
    {"--tp-comm-overlap", "--tp-comm-overlap needs"},
    {"--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
     "--no-overlap-p2p-communication",
     "more than two pipeline ranks"},
    {"--num-experts 8 --overlap-moe-expert-parallel-comm", "needs expert parallelism"},
    {"--moe-router-topk 2", "need --num-experts"},
    {"--num-experts 8 --moe-pad-expert-input-to-capacity", "needs --moe-expert-capacity"},
    {"--num-experts 8 --moe-enable-deepep", "needs dispatcher flex"},
    {"--num-experts 8 --moe-shared-expert-overlap", "alltoall or flex"},
    {"--num-experts 8 --moe-router-padding-for-fp8 --moe-token-dispatcher-type flex",
     "padding of the router"},
    {"--num-experts 8 --moe-router-enable-expert-bias", "needs sigmoid"},
    {"--num-experts 8 --moe-router-topk 1", "one expert per token"},
    {"--use-precision-aware-optimizer", "needs adam and a distributed"},
    {"--exp-avg-dtype bf16", "need --use-precision-aware"},
    {"--fp8-param-gather --fp8-format e4m3", "--fp8-param-gather needs"},
    {"--bf16 --fp16", "excludes --fp16"},
    {"--multi-latent-attention --group-query-attention", "excludes --group-query"},
    {"--swiglu --squared-relu", "one of --swiglu"},
    {"--seq-length 4096 --max-position-embeddings 2048", "at least as many"},
    {"--mtp-num-layers 1", "multi-token prediction needs"}};

std::vector<std::string> words_of(std::string_view line) {
  std::vector<std::string> words(1);
  for (const char symbol : line) {
    if (symbol == ' ') {
      words.emplace_back();
    } else {
      words.back() += symbol;
    }
  }
  return words;
}

TEST(Exclusions, EachRuleSeesFlagsThatBreakIt) {
  EXPECT_THAT(check_exclusions({"--num-layers", "4"}), IsEmpty());
  for (const BrokenRule& rule : kBrokenRules) {
    EXPECT_THAT(check_exclusions(words_of(rule.flags)), Contains(HasSubstr(rule.sentence)))
        << rule.flags;
  }
}

TEST(Exclusions, ReaderRefusesWhatTheRulesExclude) {
  // Each on top of flags that read well: the reader has to refuse it, or take the flag back.
  const std::string base =
      "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
      "--max-position-embeddings 1024 --vocab-size 1024 --micro-batch-size 1 "
      "--disable-bias-linear --position-embedding-type rope ";
  EXPECT_NO_THROW(megatron_job_from_words(words_of(base + "--bf16"), "base", {.world_size = 32}));
  const std::set<std::string> taken_back = {
      "--sequence-parallel",  // Megatron turns it off where there is no tensor parallelism
      "--cpu-offloading-num-layers 2 --pipeline-model-parallel-size 2",  // not modelled
      "--mtp-num-layers 1",                                              // the base has rope
      "--num-experts 8 --expert-tensor-parallel-size 2"};                // and no biases
  for (const BrokenRule& rule : kBrokenRules) {
    if (taken_back.contains(rule.flags)) continue;
    EXPECT_THROW(megatron_job_from_words(words_of(base + rule.flags), "flags", {.world_size = 32}),
                 InvalidInput)
        << rule.flags;
  }
}

}  // namespace
}  // namespace bagualu
