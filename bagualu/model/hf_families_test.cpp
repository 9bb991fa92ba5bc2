// What the readers of config.json make of each family's own keys; counts are in hf_golden_test.cpp.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/model/hf_config.h"

namespace bagualu {
namespace {

Json sizes(const std::string& model_type) {
  return {{"model_type", model_type}, {"hidden_size", 64},        {"intermediate_size", 96},
          {"num_attention_heads", 4}, {"num_hidden_layers", 4},   {"num_key_value_heads", 2},
          {"num_local_experts", 8},   {"num_experts_per_tok", 2}, {"moe_intermediate_size", 48},
          {"vocab_size", 256}};
}

Json dense(const std::string& model_type) {
  Json object = sizes(model_type);
  for (const char* key : {"num_local_experts", "num_experts_per_tok", "moe_intermediate_size"}) {
    object.erase(key);
  }
  return object;
}

Json with_own_width(const std::string& model_type) {
  Json object = sizes(model_type);
  object.erase("moe_intermediate_size");
  return object;
}

ModelSpec spec_of(const Json& object) { return read_hf_config(object, "config.json").spec; }

std::string refused(const Json& object) {
  try {
    read_hf_config(object, "config.json");
  } catch (const InvalidInput& error) {
    return error.field();
  }
  return "";
}

using Flags = std::vector<uint8_t>;

TEST(HfFamilies, DenseModelsHaveNoExperts) {
  for (const char* family : {"llama", "qwen2", "qwen3", "mistral"}) {
    const ModelSpec spec = spec_of(dense(family));
    EXPECT_EQ(spec.family, family);
    EXPECT_FALSE(spec.has_moe());
    EXPECT_EQ(spec.dense_ffn, 96);
    EXPECT_EQ(spec.qk_norm, spec.family == "qwen3");
    EXPECT_EQ(spec.qkv_bias, spec.family == "qwen2") << family;
    EXPECT_FALSE(spec.attn_out_bias);
  }
  EXPECT_EQ(refused(sizes("llama")), "num_local_experts") << "a dense family has no such key";
}

TEST(HfFamilies, AbsentKeysMeanTheDefaultsOfTheClass) {
  EXPECT_EQ(spec_of(dense("qwen3")).head_dim, 128);
  EXPECT_EQ(spec_of(dense("llama")).head_dim, 16);  // 64 / 4
  EXPECT_EQ(spec_of(dense("mistral")).attention_window, 4096);
  Json no_window = dense("mistral");
  no_window["sliding_window"] = nullptr;
  EXPECT_EQ(spec_of(no_window).attention_window, 0);
  const ModelSpec oss = spec_of(with_own_width("gpt_oss"));
  EXPECT_EQ(oss.head_dim, 64);
  EXPECT_EQ(oss.attention_window, 128);
  EXPECT_EQ(oss.rope_theta, 150000.0);
  EXPECT_TRUE(oss.qkv_bias && oss.attn_out_bias && oss.mlp_bias && oss.router_bias &&
              oss.attn_sinks);
  EXPECT_EQ(spec_of(with_own_width("olmoe")).rms_eps, 1e-5);
}

TEST(HfFamilies, WindowsLieWhereTransformersPutsThem) {
  EXPECT_EQ(spec_of(with_own_width("gpt_oss")).windowed_layer, (Flags{1, 0, 1, 0}));
  Json qwen2 = dense("qwen2");
  qwen2["use_sliding_window"] = true;
  qwen2["sliding_window"] = 32;
  qwen2["max_window_layers"] = 3;  // the layers behind them are windowed
  EXPECT_EQ(spec_of(qwen2).windowed_layer, (Flags{0, 0, 0, 1}));
  qwen2["layer_types"] = {"sliding_attention", "full_attention", "full_attention",
                          "full_attention"};
  EXPECT_EQ(spec_of(qwen2).windowed_layer, (Flags{1, 0, 0, 0}));
  Json moe = sizes("qwen2_moe");
  moe["shared_expert_intermediate_size"] = 64;
  moe["use_sliding_window"] = true;
  moe["sliding_window"] = 32;
  moe["max_window_layers"] = 3;  // every other one of the layers before
  EXPECT_EQ(spec_of(moe).windowed_layer, (Flags{1, 0, 1, 0}));
  moe["use_sliding_window"] = false;
  EXPECT_EQ(spec_of(moe).attention_window, 0);
  Json mixtral = with_own_width("mixtral");
  mixtral["sliding_window"] = 32;
  EXPECT_EQ(spec_of(mixtral).windowed_layer, (Flags{1, 1, 1, 1}));
  mixtral["max_position_embeddings"] = 32;
  EXPECT_EQ(spec_of(mixtral).attention_window, 0) << "it never cuts";
}

TEST(HfFamilies, LayerTypesHaveToFit) {
  Json object = with_own_width("gpt_oss");
  object["layer_types"] = {"full_attention"};
  EXPECT_EQ(refused(object), "layer_types");
  object["layer_types"] = {"full_attention", "full_attention", "linear_attention",
                           "full_attention"};
  EXPECT_EQ(refused(object), "layer_types[2]");
  object["layer_types"] = {"full_attention", "full_attention", "sliding_attention",
                           "full_attention"};
  object["sliding_window"] = nullptr;
  EXPECT_EQ(refused(object), "layer_types");
}

Json llama4() {
  Json object = with_own_width("llama4_text");
  object["intermediate_size_mlp"] = 128;
  return object;
}

TEST(HfFamilies, Llama4AlternatesExpertsAndChunks) {
  Json object = llama4();
  object["interleave_moe_layer_step"] = 2;
  ModelSpec spec = spec_of(object);
  EXPECT_EQ(spec.moe_layer, (Flags{0, 1, 0, 1}));
  EXPECT_EQ(spec.dense_ffn, 128);
  EXPECT_EQ(spec.shared_ffn, 96);
  EXPECT_EQ(spec.attention_window, 8192);
  EXPECT_EQ(spec.windowed_layer, (Flags{1, 1, 1, 0})) << "every fourth layer has no RoPE";
  EXPECT_TRUE(spec.qk_norm && spec.qk_norm_weightless);
  object["moe_layers"] = {0};
  object["no_rope_layers"] = {1, 0, 1, 0};
  spec = spec_of(object);
  EXPECT_EQ(spec.moe_layer, (Flags{1, 0, 0, 0}));
  EXPECT_EQ(spec.windowed_layer, (Flags{1, 0, 1, 0}));
  object["moe_layers"] = Json::array();
  EXPECT_FALSE(spec_of(object).has_moe());
  object["no_rope_layers"] = {1, 0};
  EXPECT_EQ(refused(object), "no_rope_layers");
}

TEST(HfFamilies, AModelWithPicturesIsPlannedAsItsText) {
  Json object = {{"model_type", "llama4"},
                 {"architectures", {"Llama4ForConditionalGeneration"}},
                 {"text_config", llama4()},
                 {"vision_config", {{"hidden_size", 32}}}};
  const ReadModel read = read_hf_config(object, "config.json");
  EXPECT_EQ(read.spec, spec_of(llama4()));
  const std::vector<std::string> expected = {"architectures", "vision_config",
                                             "text_config.intermediate_size_mlp"};
  EXPECT_EQ(read.ignored, expected) << "no layer is dense";
  object["text_config"]["atention_bias"] = true;
  EXPECT_EQ(refused(object), "atention_bias");
  object["text_config"].erase("atention_bias");
  object["tie_word_embeddings"] = true;
  EXPECT_EQ(refused(object), "tie_word_embeddings") << "the text model says false";
}

TEST(HfFamilies, DeepSeekWithoutAQueryLatentOrWithoutExperts) {
  Json object = sizes("deepseek_v2");
  object.erase("num_local_experts");
  object.update({{"n_routed_experts", 8},
                 {"kv_lora_rank", 32},
                 {"qk_nope_head_dim", 32},
                 {"qk_rope_head_dim", 16},
                 {"v_head_dim", 32},
                 {"num_key_value_heads", 4},
                 {"q_lora_rank", nullptr},
                 {"first_k_dense_replace", 1}});
  ModelSpec spec = spec_of(object);
  EXPECT_TRUE(spec.has_mla());
  EXPECT_EQ(spec.q_lora_rank, 0);
  EXPECT_EQ(spec.head_dim, 48);
  EXPECT_EQ(spec.moe_layer, (Flags{0, 1, 1, 1}));
  object["first_k_dense_replace"] = 4;  // a model cut down to its dense layers
  spec = spec_of(object);
  EXPECT_FALSE(spec.has_moe());
  EXPECT_EQ(spec.dense_ffn, 96);
}

TEST(HfFamilies, ListsWhatItIgnoresInTheFilesOrder) {
  Json object = with_own_width("granitemoe");
  object["logits_scaling"] = 6.0;
  object["attention_dropout"] = 0.1;
  object["pad_token_id"] = nullptr;  // says nothing
  object["rope_scaling"] = {{"type", "yarn"}, {"factor", 4.0}};
  object["hidden_act"] = "gelu";
  object["torch_dtype"] = "bfloat16";
  const std::vector<std::string> expected = {"logits_scaling", "attention_dropout", "rope_scaling",
                                             "hidden_act", "torch_dtype"};
  EXPECT_EQ(read_hf_config(object, "config.json").ignored, expected);
}

TEST(HfFamilies, KeysThatContradictEachOtherAreErrors) {
  Json object = sizes("qwen3_moe");
  object["num_experts"] = 16;
  EXPECT_EQ(refused(object), "num_local_experts");
  object = dense("llama");
  object["rope_theta"] = 1e4;
  object["rope_parameters"] = {{"rope_theta", 5e5}};
  EXPECT_EQ(refused(object), "rope_theta");
  object["rope_parameters"] = {{"rope_theta", 1e4}};
  EXPECT_EQ(refused(object), "");
}

TEST(HfFamilies, RuntimesReaderStaysStrict) {
  // The same file is planned with its window and refused for training.
  Json object = with_own_width("mixtral");
  object["sliding_window"] = 32;
  EXPECT_EQ(refused(object), "");
  EXPECT_THROW(model_from_hf_config(object, "config.json"), InvalidInput);
  object["sliding_window"] = nullptr;
  EXPECT_EQ(model_from_hf_config(object, "config.json"), spec_of(object));
}

}  // namespace
}  // namespace bagualu
