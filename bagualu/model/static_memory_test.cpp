#include "bagualu/model/static_memory.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/model/parameters.h"

namespace bagualu {
namespace {

ModelSpec preset(const std::string& name) {
  return model_from_file(std::string(BAGUALU_SOURCE_DIR) + "/configs/models/" + name + ".json");
}

TEST(ParameterLayout, ListsTheParametersInOrderOfExecution) {
  std::vector<std::string> names;
  for (const Parameter& p : parameter_layout(preset("tiny"), 4).parameters) {
    if (p.layer < 2) names.push_back(p.name);
  }
  const std::vector<std::string> expected = {
      "embed_tokens",        "layers.0.attn_norm",  "layers.0.qkv",
      "layers.0.attn_proj",  "layers.0.mlp_norm",   "layers.0.mlp_fc1",
      "layers.0.mlp_fc2",    "layers.1.attn_norm",  "layers.1.qkv",
      "layers.1.attn_proj",  "layers.1.mlp_norm",   "layers.1.router",
      "layers.1.shared_fc1", "layers.1.shared_fc2", "layers.1.expert_fc1",
      "layers.1.expert_fc2", "final_norm",          "lm_head"};
  EXPECT_EQ(names, expected);
}

TEST(ParameterLayout, GivesShapes) {
  const ParameterLayout layout = parameter_layout(preset("tiny"), 4);
  const auto shape = [&](const char* name) { return layout.find(name).shape; };
  using Shape = std::vector<int64_t>;
  EXPECT_EQ(shape("embed_tokens"), (Shape{256, 64}));
  EXPECT_EQ(shape("layers.0.qkv"), (Shape{128, 64}));  // (4 + 2 * 2) heads * 16
  EXPECT_EQ(shape("layers.0.attn_proj"), (Shape{64, 64}));
  EXPECT_EQ(shape("layers.0.mlp_fc1"), (Shape{256, 64}));  // gate and up
  EXPECT_EQ(shape("layers.0.mlp_fc2"), (Shape{64, 128}));
  EXPECT_EQ(shape("layers.1.router"), (Shape{8, 64}));
  EXPECT_EQ(shape("layers.1.expert_fc1"), (Shape{2, 128, 64}));  // 8 experts on 4 ranks
  EXPECT_EQ(shape("layers.1.expert_fc2"), (Shape{2, 64, 64}));
  EXPECT_EQ(shape("layers.1.shared_fc1"), (Shape{128, 64}));
  EXPECT_EQ(shape("layers.1.shared_fc2"), (Shape{64, 64}));
  EXPECT_THROW(layout.find("layers.0.router"), InternalError);
}

TEST(ParameterLayout, NormsHaveNoDecayAndExpertsTheirOwnGroup) {
  for (const Parameter& p : parameter_layout(preset("qwen3-30b-a3b"), 8).parameters) {
    EXPECT_EQ(p.decay, p.name.find("norm") == std::string::npos) << p.name;
    EXPECT_EQ(p.group == ParameterGroup::kExpert, p.name.find("expert") != std::string::npos)
        << p.name;
  }
}

TEST(ParameterLayout, FillsTheFlatBuffersWithoutOverlap) {
  ModelSpec odd = preset("tiny");
  odd.vocab = 257;
  for (const ModelSpec& spec : {preset("tiny"), preset("demo"), preset("qwen3-30b-a3b"), odd}) {
    const ParameterLayout layout = parameter_layout(spec, 4);
    std::set<std::string> names;
    int64_t end[2] = {0, 0};
    for (const Parameter& p : layout.parameters) {
      int64_t& group_end = end[p.group == ParameterGroup::kExpert];
      EXPECT_TRUE(names.insert(p.name).second) << p.name;
      EXPECT_EQ(p.offset_elements % 16, 0) << p.name;
      EXPECT_GE(p.offset_elements, group_end) << p.name;
      EXPECT_LT(p.offset_elements, group_end + 16) << p.name;
      EXPECT_EQ(p.elements,
                std::accumulate(p.shape.begin(), p.shape.end(), int64_t{1}, std::multiplies<>()));
      group_end = p.offset_elements + p.elements;
    }
    EXPECT_EQ(layout.group_elements(ParameterGroup::kDense), layout.dense_elements);
    EXPECT_EQ(layout.group_elements(ParameterGroup::kExpert), layout.expert_elements);
    EXPECT_EQ(layout.dense_elements, (end[0] + 15) / 16 * 16);
    EXPECT_EQ(layout.expert_elements, (end[1] + 15) / 16 * 16);
  }
}

TEST(ParameterCounts, EqualThePublishedOnes) {
  // The models' cards: Mixtral 8x7B 46.7 B (12.9 B active), Qwen3-30B-A3B 30.5 B (3.3 B active).
  EXPECT_EQ(total_parameters(preset("mixtral-8x7b")), 46'702'792'704);
  EXPECT_EQ(active_parameters(preset("mixtral-8x7b")), 12'879'925'248);
  EXPECT_EQ(total_parameters(preset("qwen3-30b-a3b")), 30'532'122'624);
  EXPECT_EQ(active_parameters(preset("qwen3-30b-a3b")), 3'353'032'704);
}

// DeepSeek-V3 without its multi-token prediction layer has 671,026,419,200 parameters, router
// biases included, which are buffers here: 58 layers * 256. Kimi-K2's card says 1.03 T (1T), 32 B
// active. By hand, per layer: attention 7168 * (1536 + 576) + 1536 * H * 192 + 512 * H * 256 +
// H * 128 * 7168 and norms 1536 + 512 + 2 * 7168.
TEST(ParameterCounts, OfLatentAttentionEqualThePublishedOnes) {
  const ModelSpec deepseek = preset("deepseek-v3");
  EXPECT_EQ(total_parameters(deepseek) + 58 * 256, 671'026'419'200);
  const ModelSpec kimi = preset("kimi-k2");
  const int64_t attention =
      7168 * (1536 + 576) + 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * 7168;
  const int64_t moe = int64_t{385} * 3 * 7168 * 2048 + 384 * 7168;
  EXPECT_EQ(total_parameters(kimi), 61 * (attention + 1536 + 512 + 2 * 7168) + 60 * moe +
                                        3 * 7168 * 18432 + int64_t{2} * 163840 * 7168 + 7168);
  EXPECT_NEAR(static_cast<double>(total_parameters(kimi)), 1.03e12, 0.005e12);
  EXPECT_NEAR(static_cast<double>(active_parameters(kimi)), 32e9, 1e9);
  EXPECT_EQ(total_parameters(preset("mixtral-8x22b")), 140'620'634'112);
  EXPECT_EQ(total_parameters(preset("qwen3-235b-a22b")), 235'093'634'560);
}

TEST(ParameterLayout, LatentAttentionHasItsOwnParameters) {
  const ParameterLayout layout = parameter_layout(preset("deepseek-v3"), 64);
  using Shape = std::vector<int64_t>;
  EXPECT_EQ(layout.find("layers.60.q_down").shape, (Shape{1536, 7168}));
  EXPECT_EQ(layout.find("layers.60.q_up").shape, (Shape{24576, 1536}));
  EXPECT_EQ(layout.find("layers.60.kv_down").shape, (Shape{576, 7168}));
  EXPECT_EQ(layout.find("layers.60.kv_up").shape, (Shape{32768, 512}));
  EXPECT_EQ(layout.find("layers.60.attn_proj").shape, (Shape{7168, 16384}));
  EXPECT_FALSE(layout.find("layers.60.kv_norm").decay);
  EXPECT_THROW(layout.find("layers.60.qkv"), InternalError);
}

TEST(StaticMemory, CountsEveryStorageOnce) {
  // demo, EP 4. Dense elements: embedding and head 2 * 256 * 128 = 65,536; per layer norms
  // 2 * 128, qkv (8 + 2 * 4) * 16 * 128 = 32,768, attn_proj 128 * 128 = 16,384, router
  // 16 * 128 = 2,048: 51,456 * 4 layers = 205,824; final norm 128. Sum 271,488.
  // Expert elements: 4 local experts * 3 * 128 * 128 * 4 layers = 786,432.
  const StaticMemory memory = static_memory(preset("demo"), {4, 4}, Dtype::kFp32);
  EXPECT_EQ(memory.dense_bytes, int64_t{271'488} * 16);  // 4 buffers of 4 bytes
  EXPECT_EQ(memory.expert_bytes, int64_t{786'432} * 16);
  EXPECT_EQ(memory.buffer_bytes, 4 * 64);  // 16 biases of 4 bytes per layer
  EXPECT_EQ(memory.total_bytes(), 16'926'976);
  EXPECT_EQ(memory.storages.size(), 12u);
  int64_t sum = 0;
  for (const StaticStorage& storage : memory.storages) {
    EXPECT_EQ(storage.bytes % 64, 0) << storage.name;
    sum += storage.bytes;
  }
  EXPECT_EQ(sum, memory.total_bytes());
}

TEST(StaticMemory, AddsAWorkingCopyInBf16) {
  const StaticMemory memory = static_memory(preset("demo"), {4, 4}, Dtype::kBf16);
  EXPECT_EQ(memory.dense_bytes, int64_t{271'488} * 18);
  EXPECT_EQ(memory.expert_bytes, int64_t{786'432} * 18);
  EXPECT_EQ(memory.storages.size(), 14u);
}

TEST(StaticMemory, SplitsExpertsOnlyOverExpertParallelRanks) {
  const StaticMemory one = static_memory(preset("demo"), {8, 1}, Dtype::kFp32);
  const StaticMemory four = static_memory(preset("demo"), {8, 4}, Dtype::kFp32);
  EXPECT_EQ(one.expert_bytes, 4 * four.expert_bytes);
  EXPECT_EQ(one.dense_bytes, four.dense_bytes);
}

TEST(RouterBias, ExistsInLayersWithExpertsOnly) {
  EXPECT_EQ(router_bias_names(preset("tiny")),
            (std::vector<std::string>{"layers.1.router_bias", "layers.2.router_bias",
                                      "layers.3.router_bias"}));
}

ParallelLayout pipeline(int64_t pp, std::vector<int64_t> layers, PipelineKind kind) {
  ParallelLayout layout{.world_size = pp, .ep_size = 1, .pp_size = pp, .pipeline = kind};
  layout.virtual_per_rank = kind == PipelineKind::kInterleaved ? 2 : 1;
  layout.stage_layers = std::move(layers);
  return layout;
}

std::vector<ParallelLayout> pipelines() {
  return {pipeline(2, {3, 1}, PipelineKind::k1F1B), pipeline(4, {0, 2, 2, 0}, PipelineKind::k1F1B),
          pipeline(2, {1, 1, 1, 1}, PipelineKind::kInterleaved),
          pipeline(2, {1, 1, 2, 0}, PipelineKind::kDualPipeV)};
}

TEST(ParameterLayout, OfAllStagesIsTheModel) {
  const ModelSpec spec = preset("tiny");
  std::multiset<std::string> whole;
  for (const Parameter& p : parameter_layout(spec, 2).parameters) whole.insert(p.name);
  for (const ParallelLayout& layout : pipelines()) {
    std::multiset<std::string> names;
    int64_t dense = 0, expert = 0;
    for (int64_t rank = 0; rank < layout.pp_size; ++rank) {
      const ParameterLayout part = parameter_layout(spec, 2, rank_slices(spec, layout, rank));
      for (const Parameter& p : part.parameters) names.insert(p.name);
      dense += part.dense_elements;
      expert += part.expert_elements;
    }
    EXPECT_EQ(names, whole);
    EXPECT_EQ(dense, parameter_layout(spec, 2).dense_elements);
    EXPECT_EQ(expert, parameter_layout(spec, 2).expert_elements);
  }
}

TEST(ParameterLayout, TiedHeadIsTheEmbeddingOrACopyOfIt) {
  ModelSpec spec = preset("tiny");
  spec.tied_embeddings = true;
  EXPECT_FALSE(parameter_layout(spec, 1).holds("lm_head"));
  EXPECT_FALSE(parameter_layout(spec, 1).find("embed_tokens").tied_copy);
  const ParallelLayout two = pipeline(2, {2, 2}, PipelineKind::k1F1B);
  EXPECT_FALSE(parameter_layout(spec, 1, rank_slices(spec, two, 0)).find("embed_tokens").tied_copy);
  const ParameterLayout last = parameter_layout(spec, 1, rank_slices(spec, two, 1));
  EXPECT_TRUE(last.find("embed_tokens").tied_copy);
  EXPECT_EQ(last.counted_dense_elements(), last.dense_elements - 256 * 64);  // V h
  EXPECT_TRUE(shares_embedding(spec, two, 0) && shares_embedding(spec, two, 1));
  // In a V rank 0 has both ends: one tensor, no copy.
  const ParallelLayout v = pipeline(2, {1, 1, 1, 1}, PipelineKind::kDualPipeV);
  const ParameterLayout ends = parameter_layout(spec, 1, rank_slices(spec, v, 0));
  EXPECT_FALSE(ends.find("embed_tokens").tied_copy);
  EXPECT_EQ(ends.counted_dense_elements(), ends.dense_elements);
  EXPECT_FALSE(shares_embedding(spec, v, 0));
  EXPECT_FALSE(parameter_layout(spec, 1, rank_slices(spec, v, 1)).holds("embed_tokens"));
}

TEST(StaticMemory, OfAllStagesIsTheModels) {
  const ModelSpec spec = preset("tiny");
  for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
    const StaticMemory whole = static_memory(spec, {1, 1}, dtype);
    for (const ParallelLayout& layout : pipelines()) {
      int64_t dense = 0, expert = 0, buffers = 0;
      for (int64_t rank = 0; rank < layout.pp_size; ++rank) {
        const StaticMemory part = static_memory(spec, layout, dtype, rank);
        dense += part.dense_bytes;
        expert += part.expert_bytes;
        buffers += part.buffer_bytes;
      }
      // Lengths are multiples of 16 elements: 64 bytes in fp32, 32 in bf16, where a rank's working
      // copy may take half a line more.
      EXPECT_GE(dense, whole.dense_bytes);
      EXPECT_LE(dense, whole.dense_bytes + 32 * layout.pp_size);
      EXPECT_GE(expert, whole.expert_bytes);
      EXPECT_LE(expert, whole.expert_bytes + 32 * layout.pp_size);
      EXPECT_EQ(buffers, whole.buffer_bytes);
      if (dtype == Dtype::kFp32) EXPECT_EQ(dense + expert, whole.dense_bytes + whole.expert_bytes);
    }
  }
}

TEST(StaticMemory, KeepsIdsAtTheEmbeddingAndTargetsAtTheHead) {
  const ModelSpec spec = preset("tiny");  // 8 experts, layers 1 to 3 have them
  const TrainShape shape{.micro_batch_size = 2, .seq = 128, .microbatches = 3};
  const ParallelLayout layout = pipeline(3, {1, 2, 1}, PipelineKind::k1F1B);
  const int64_t rope = 2 * 128 * 16 * 4, tokens = 6208, micro = 2 * 128 * 8;
  const auto bytes = [&](int64_t rank, int64_t slots) {
    StaticMemory memory;
    add_step_tables(spec, layout, shape, memory, rank, slots);
    return memory.table_bytes - rope - tokens - 64 - 64;  // scalars; sums over stages, 5 of 8 bytes
  };
  EXPECT_EQ(bytes(0, 2), 2 * micro + 1 * 8 * 8);  // two micro-batches' ids
  EXPECT_EQ(bytes(1, 2), 2 * 8 * 8);              // two MoE layers
  EXPECT_EQ(bytes(2, 3), 3 * micro + 1 * 8 * 8);
}

TEST(StaticMemory, CountsTheTablesOfAStep) {
  const ModelSpec spec = preset("demo");
  StaticMemory memory;
  add_step_tables(spec, {.world_size = 4, .ep_size = 4},
                  {.micro_batch_size = 2, .seq = 128, .microbatches = 3}, memory);
  // rope 2 * 128 * 16 * 4; ids and targets 2 * 256 * 8; scalars 64; 4 layers * 16 experts * 8;
  // counts 2 * 4 * 16 * 8; tokens 3 * 2 * 129 * 8 = 6192, rounded up to 6208
  EXPECT_EQ(memory.table_bytes, 16384 + 4096 + 64 + 512 + 1024 + 6208);
  EXPECT_EQ(memory.total_bytes(), memory.table_bytes);
}

}  // namespace
}  // namespace bagualu
