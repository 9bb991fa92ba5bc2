#include "bagualu/model/parameters.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/model/parameter_layout.h"

namespace bagualu {
namespace {

ModelSpec preset(const std::string& name) {
  return model_from_file(BAGUALU_SOURCE_DIR "/configs/models/" + name + ".json");
}

/// h 64, 4 heads and 2 key-value heads of 16, 256 tokens; layer 0 dense (128), 1 to 3 with 8
/// experts of 64, top 2, and a shared expert of 64.
ModelSpec tiny() { return preset("tiny"); }

/// tiny with every variant at once.
ModelSpec everything() {
  ModelSpec spec = tiny();
  spec.family = "megatron";
  spec.layer_norm = spec.qkv_bias = spec.attn_out_bias = spec.mlp_bias = spec.router_bias = true;
  spec.qk_norm = spec.qk_norm_full_width = spec.attn_sinks = spec.shared_gate = true;
  spec.tied_embeddings = true;
  spec.gated_mlp = false;
  spec.mtp_layers = 1;
  spec.learned_positions = 32;
  validate(spec, "everything");
  return spec;
}

ModelSpec latent(int64_t q_lora_rank) {
  ModelSpec spec = tiny();
  spec.kv_heads = 4;
  spec.head_dim = 48;
  spec.q_lora_rank = q_lora_rank;
  spec.kv_lora_rank = 32;
  spec.qk_nope_head_dim = 32;
  spec.qk_rope_head_dim = 16;
  spec.v_head_dim = 16;
  validate(spec, "latent");
  return spec;
}

int64_t elements_of(const ModelSpec& spec, const std::string& name) {
  for (const PlannedParameter& row : planned_parameters(spec)) {
    if (row.name == name) return row.elements;
  }
  return 0;
}

TEST(PlannedParameters, OfADenseAndAnMoeLayer) {
  const ModelParameters parts = model_parameters(tiny());
  // Norms 2 * 64. qkv 64 * (4 + 2 * 2) * 16 = 8192, attn_proj 64 * 64 = 4096, fc1 64 * 256 = 16384,
  // fc2 128 * 64 = 8192.
  EXPECT_EQ(parts.dense_layer, (ParameterSums{128, 8192 + 4096 + 16384 + 8192, 0, 0, 0}));
  // Norms 128 and router 8 * 64; shared expert 3 * 64 * 64 = 12288, an expert the same.
  EXPECT_EQ(parts.moe_layer, (ParameterSums{128 + 512, 8192 + 4096 + 12288, 0, 12288, 0}));
  EXPECT_EQ(parts.embedding, (ParameterSums{0, 0, 64, 0, 0}));
  EXPECT_EQ(parts.head, parts.embedding);
  EXPECT_EQ(parts.final_norm, (ParameterSums{64, 0, 0, 0, 0}));
  EXPECT_EQ(parts.mtp_layer, ParameterSums{});
  EXPECT_EQ(parts.embedding_copy, ParameterSums{});
}

TEST(PlannedParameters, OfEveryVariant) {
  const ModelParameters parts = model_parameters(everything());
  // LayerNorms 2 * 2 * 64 = 256; query norm over 4 * 16 and key norm over 2 * 16, two vectors each:
  // 192; biases of attn_proj and shared fc2 2 * 64; router 8 * 64 + 8; gate 64.
  const int64_t replicated = 256 + 192 + 128 + 520 + 64;
  // qkv 8192 + 128, sinks 4, attn_proj 4096, shared fc1 64 * 64 + 64 and fc2 64 * 64.
  const int64_t split = 8320 + 4 + 4096 + 4096 + 64 + 4096;
  EXPECT_EQ(parts.moe_layer, (ParameterSums{replicated, split, 0, 4096 + 64 + 4096, 64}));
  // enorm, hnorm and final norm of 2 * 64; eh_proj 128 * 64.
  ParameterSums mtp = parts.moe_layer;
  mtp += ParameterSums{3 * 128, 8192, 0, 0, 0};
  EXPECT_EQ(parts.mtp_layer, mtp);
  EXPECT_EQ(parts.embedding, (ParameterSums{32 * 64, 0, 64, 0, 0}));
  EXPECT_EQ(parts.head, ParameterSums{}) << "tied";
}

TEST(PlannedParameters, OfLatentAttentionWithAndWithoutAQueryLatent) {
  // kv_down 64 * (32 + 16) = 3072 and its norm 32; kv_up 32 * 4 * (32 + 16) = 6144; attn_proj
  // 4 * 16 * 64 = 4096; queries 64 * 16 + 16 + 16 * 192, or 64 * 192.
  const ModelParameters two = model_parameters(latent(16));
  EXPECT_EQ(two.dense_layer.replicated, 128 + 3072 + 32 + 1024 + 16);
  EXPECT_EQ(two.dense_layer.tensor_parallel, 6144 + 4096 + 3072 + 3 * 64 * 128);
  const ModelParameters one = model_parameters(latent(0));
  EXPECT_EQ(one.dense_layer.replicated, 128 + 3072 + 32);
  EXPECT_EQ(one.dense_layer.tensor_parallel, 6144 + 4096 + 12288 + 3 * 64 * 128);
  EXPECT_EQ(elements_of(latent(0), "decoder.layers.1.self_attention.linear_q_proj.weight"), 12288);
}

TEST(PlannedParameters, ListAndSumsAgree) {
  const std::vector<ModelSpec> specs = {tiny(),     everything(),          latent(0),
                                        latent(16), preset("deepseek-v3"), preset("mixtral-8x7b")};
  for (const ModelSpec& spec : specs) {
    std::set<std::string> names;
    int64_t model = 0, mtp = 0;
    for (const PlannedParameter& row : planned_parameters(spec)) {
      EXPECT_TRUE(names.insert(row.name).second) << row.name;
      EXPECT_GT(row.elements, 0) << row.name;
      (row.place == PlannedParameter::Place::kMtp ? mtp : model) += row.elements;
    }
    EXPECT_EQ(model, total_parameters(spec)) << spec.name;
    EXPECT_EQ(mtp, mtp_parameters(spec)) << spec.name;
  }
}

TEST(PlannedParameters, AreThoseTheRuntimeTrains) {
  for (const char* name : {"tiny", "demo", "qwen3-30b-a3b", "deepseek-v3"}) {
    int64_t sum = 0;
    for (const Parameter& p : parameter_layout(preset(name), 1).parameters) sum += p.elements;
    EXPECT_EQ(total_parameters(preset(name)), sum) << name;
  }
}

TEST(PlannedParameters, OfDeepSeeksPredictionLayer) {
  ModelSpec spec = preset("deepseek-v3");
  spec.mtp_layers = 1;
  // Joint norms 2 * 7168, eh_proj 2 * 7168^2, one MoE layer, final norm 7168: 11.5 B. Embedding and
  // head are the model's own.
  const int64_t attention =
      7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168;
  const int64_t moe = int64_t{257} * 3 * 7168 * 2048 + 256 * 7168;
  EXPECT_EQ(mtp_parameters(spec),
            3 * 7168 + int64_t{2} * 7168 * 7168 + attention + 1536 + 512 + 2 * 7168 + moe);
}

TEST(RankElements, SplitsEachKindOverItsRanks) {
  const ModelSpec spec = everything();
  JobLayout layout{.world_size = 8, .tp = 2, .ep = 4, .etp = 2};
  // 256 tokens padded to 512: 256 rows of 64 on each of two ranks, positions whole.
  EXPECT_EQ(rank_elements(model_parameters(spec).embedding, spec, layout, 512),
            (RankElements{32 * 64 + 256 * 64, 0}));
  // Two experts: half of each matrix and of fc1's bias, fc2's bias whole.
  const ParameterSums sums{100, 200, 0, 4096 + 64 + 4096, 64};
  EXPECT_EQ(rank_elements(sums, spec, layout, 512),
            (RankElements{100 + 100, 2 * (2048 + 32 + 2048 + 64)}));
}

TEST(StageParameters, CountCopiesOfTheEmbeddingWhereItIsNotHeld) {
  ModelSpec spec = tiny();
  spec.family = "megatron";
  const auto vocab_columns = [&](const StageContent& stage, bool has_embedding) {
    return stage_parameters(spec, model_parameters(spec), stage, has_embedding).vocab_columns;
  };
  const StageContent first{.first_layer = 0, .layer_count = 2, .embedding = true};
  StageContent last{.first_layer = 2, .layer_count = 2, .head = true};
  EXPECT_EQ(vocab_columns(first, false), 64);
  EXPECT_EQ(vocab_columns(last, false), 64) << "its own matrix";
  spec.tied_embeddings = true;
  EXPECT_EQ(vocab_columns(first, false), 64);
  EXPECT_EQ(vocab_columns(last, false), 64) << "a copy";
  EXPECT_EQ(vocab_columns(last, true), 0);
  spec.mtp_layers = last.mtp_layers = 1;
  EXPECT_EQ(vocab_columns(last, false), 64) << "head and MTP layer read the same copy";
  spec.tied_embeddings = false;
  EXPECT_EQ(vocab_columns(last, false), 128);
  const StageContent whole{
      .first_layer = 0, .layer_count = 4, .mtp_layers = 1, .embedding = true, .head = true};
  EXPECT_EQ(vocab_columns(whole, false), 128);
  ParameterSums sums = stage_parameters(spec, model_parameters(spec), whole, false);
  EXPECT_EQ(sums.expert_split, 4 * 12288) << "three layers and the MTP layer";
}

}  // namespace
}  // namespace bagualu
