#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/model/model_spec.h"

namespace bagualu {
namespace {

// What MixtralConfig(...).save_pretrained writes (transformers 5.24), sizes reduced.
constexpr const char* kMixtralConfig = R"({
  "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
  "dtype": "float32", "eos_token_id": 2, "head_dim": null, "hidden_act": "silu",
  "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96,
  "max_position_embeddings": 4096, "model_type": "mixtral", "num_attention_heads": 4,
  "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_key_value_heads": 2,
  "num_local_experts": 8, "output_router_logits": false, "pad_token_id": null,
  "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
  "router_aux_loss_coef": 0.02, "router_jitter_noise": 0.0, "sliding_window": null,
  "tie_word_embeddings": false, "transformers_version": "5.24.0", "use_cache": true,
  "vocab_size": 256
})";

// What transformers 4 wrote for Qwen3-MoE: num_experts, rope_theta at the top.
constexpr const char* kQwenConfig = R"({
  "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "decoder_sparse_step": 1, "head_dim": 32, "hidden_act": "silu", "hidden_size": 64,
  "intermediate_size": 192, "max_position_embeddings": 40960, "max_window_layers": 48,
  "mlp_only_layers": [1], "model_type": "qwen3_moe", "moe_intermediate_size": 48,
  "norm_topk_prob": true, "num_attention_heads": 4, "num_experts": 16, "num_experts_per_tok": 4,
  "num_hidden_layers": 3, "num_key_value_heads": 1, "output_router_logits": false,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0,
  "router_aux_loss_coef": 0.001, "sliding_window": null, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false, "vocab_size": 512
})";

// DeepSeek-V3's published file, less what no reader looks at.
constexpr const char* kDeepseekConfig = R"({
  "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "aux_loss_alpha": 0.001, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
  "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
  "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
  "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
  "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
  "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
  "rope_scaling": {"beta_fast": 32, "factor": 40, "mscale": 1.0, "type": "yarn"},
  "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": true,
  "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128,
  "vocab_size": 129280
})";

Json deepseek_json() { return parse_json_object(kDeepseekConfig, "deepseek"); }
Json mixtral_json() { return parse_json_object(kMixtralConfig, "mixtral"); }
Json qwen_json() { return parse_json_object(kQwenConfig, "qwen"); }

std::string refused_field(const Json& object) {
  try {
    model_from_hf_config(object, "config.json");
  } catch (const InvalidInput& error) {
    return error.field();
  }
  return "";
}

TEST(HfConfig, ReadsMixtral) {
  const ModelSpec spec = model_from_hf_config(mixtral_json(), "config.json");
  EXPECT_EQ(spec.family, "mixtral");
  EXPECT_EQ(spec.layers, 2);
  EXPECT_EQ(spec.hidden, 64);
  EXPECT_EQ(spec.heads, 4);
  EXPECT_EQ(spec.kv_heads, 2);
  EXPECT_EQ(spec.head_dim, 16);  // 64 / 4: the file says null
  EXPECT_EQ(spec.vocab, 256);
  EXPECT_EQ(spec.experts, 8);
  EXPECT_EQ(spec.top_k, 2);
  EXPECT_EQ(spec.expert_ffn, 96);
  EXPECT_EQ(spec.dense_ffn, 0);
  EXPECT_EQ(spec.moe_layers(), 2);
  EXPECT_FALSE(spec.qk_norm);
  EXPECT_TRUE(spec.norm_topk_prob);
  EXPECT_EQ(spec.rms_eps, 1e-5);
  EXPECT_EQ(spec.rope_theta, 500000.0);
  EXPECT_EQ(spec.aux_loss_coef, 0.0) << "transformers adds no such loss without router logits";
}

TEST(HfConfig, ReadsQwen3MoeOfTransformers4) {
  const ModelSpec spec = model_from_hf_config(qwen_json(), "config.json");
  EXPECT_EQ(spec.family, "qwen3_moe");
  EXPECT_EQ(spec.head_dim, 32);
  EXPECT_EQ(spec.experts, 16);
  EXPECT_EQ(spec.top_k, 4);
  EXPECT_EQ(spec.expert_ffn, 48);
  EXPECT_EQ(spec.dense_ffn, 192);
  EXPECT_EQ(spec.moe_layer, (std::vector<uint8_t>{1, 0, 1}));
  EXPECT_TRUE(spec.qk_norm);
  EXPECT_TRUE(spec.norm_topk_prob);
  EXPECT_EQ(spec.rope_theta, 1e6);
}

TEST(HfConfig, TakesAbsentKeysFromTheFamily) {
  Json mixtral = mixtral_json();
  Json qwen = qwen_json();
  for (Json* object : {&mixtral, &qwen}) {
    for (const char* key : {"rms_norm_eps", "rope_theta", "rope_parameters", "norm_topk_prob",
                            "num_key_value_heads", "mlp_only_layers", "hidden_act"}) {
      object->erase(key);
    }
  }
  const ModelSpec a = model_from_hf_config(mixtral, "mixtral");
  EXPECT_EQ(a.rms_eps, 1e-5);
  EXPECT_EQ(a.rope_theta, 1e6);
  EXPECT_EQ(a.kv_heads, 4);
  const ModelSpec b = model_from_hf_config(qwen, "qwen");
  EXPECT_EQ(b.rms_eps, 1e-6);
  EXPECT_EQ(b.rope_theta, 1e4);
  EXPECT_FALSE(b.norm_topk_prob);
  EXPECT_EQ(b.dense_ffn, 0) << "no layer is dense, so intermediate_size means nothing";
}

TEST(HfConfig, SparseStepMakesTheOtherLayersDense) {
  Json object = qwen_json();
  object["mlp_only_layers"] = Json::array();
  object["decoder_sparse_step"] = 2;  // transformers: (layer + 1) % 2 == 0 has experts
  EXPECT_EQ(model_from_hf_config(object, "config.json").moe_layer, (std::vector<uint8_t>{0, 1, 0}));
}

TEST(HfConfig, TakesTheBalancingLossWithRouterLogits) {
  Json object = mixtral_json();
  object["output_router_logits"] = true;
  EXPECT_EQ(model_from_hf_config(object, "config.json").aux_loss_coef, 0.02);
}

TEST(HfConfig, AcceptsAWindowThatNeverCuts) {
  Json object = mixtral_json();
  object["sliding_window"] = 4096;
  EXPECT_EQ(refused_field(object), "");
  Json qwen = qwen_json();
  qwen["sliding_window"] = 16;  // switched off by use_sliding_window
  EXPECT_EQ(refused_field(qwen), "");
}

TEST(HfConfig, TakesAndWritesTiedEmbeddings) {
  for (Json object : {mixtral_json(), qwen_json()}) {
    object["tie_word_embeddings"] = true;
    const ModelSpec spec = model_from_hf_config(object, "config.json");
    EXPECT_TRUE(spec.tied_embeddings);
    EXPECT_EQ(planned_only_feature(spec), "");
    EXPECT_EQ(to_hf_config(spec, 128).at("tie_word_embeddings"), true);
  }
}

TEST(HfConfig, RefusesWhatWouldChangeTheMathematics) {
  const std::vector<std::pair<const char*, Json>> mixtral_cases = {
      {"model_type", "bert"},     {"hidden_act", "gelu"},
      {"attention_bias", true},   {"attention_dropout", 0.1},     {"router_jitter_noise", 0.01},
      {"sliding_window", 1024},   {"num_hidden_layers", 0},       {"num_hidden_layers", "two"},
      {"num_attention_heads", 0}, {"num_local_experts", nullptr}, {"intermediate_size", nullptr},
      {"vocab_size", nullptr},
  };
  for (const auto& [key, value] : mixtral_cases) {
    Json object = mixtral_json();
    object[key] = value;
    EXPECT_EQ(refused_field(object), key) << value;
  }
  Json object = qwen_json();
  object["mlp_only_layers"] = {3};
  EXPECT_EQ(refused_field(object), "mlp_only_layers[0]");
  object = qwen_json();
  object["decoder_sparse_step"] = 0;
  EXPECT_EQ(refused_field(object), "decoder_sparse_step");
}

TEST(HfConfig, RefusesScaledRope) {
  for (const char* field : {"rope_parameters", "rope_scaling"}) {
    Json object = qwen_json();
    object[field] = {{"rope_type", "yarn"}, {"factor", 4.0}};
    EXPECT_EQ(refused_field(object), "rope_type");
    object[field] = {{"type", "linear"}, {"factor", 4.0}};
    EXPECT_EQ(refused_field(object), "rope_type");
    object[field] = {{"rope_type", "default"}, {"partial_rotary_factor", 0.5}};
    EXPECT_EQ(refused_field(object), "partial_rotary_factor");
    object[field] = 3;
    EXPECT_EQ(refused_field(object), field);
  }
}

TEST(HfConfig, ReadsDeepSeekAsThePreset) {
  ModelSpec spec = model_from_hf_config(deepseek_json(), "config.json");
  EXPECT_EQ(spec.moe_layers(), 58);
  EXPECT_EQ(spec.mtp_layers, 1);
  ModelSpec preset =
      model_from_file(std::string(BAGUALU_SOURCE_DIR) + "/configs/models/deepseek-v3.json");
  preset.name = spec.name;
  preset.aux_loss_coef = preset.router_bias_rate = 0;  // training options, in no such file
  EXPECT_EQ(spec, preset);
  for (const char* family : {"kimi_k2", "deepseek_v2"}) {
    Json object = deepseek_json();
    object["model_type"] = family;
    object.erase("norm_topk_prob");
    spec = model_from_hf_config(object, "config.json");
    EXPECT_EQ(spec.family, family);
    EXPECT_EQ(spec.norm_topk_prob, spec.family == "kimi_k2") << "the families' defaults differ";
  }
}

TEST(HfConfig, RefusesADeepSeekItDoesNotKnow) {
  const std::vector<std::pair<const char*, Json>> cases = {
      {"scoring_func", "tanh"},
      {"topk_method", "best"},
      {"moe_layer_freq", 2},
      {"kv_lora_rank", nullptr},
      {"n_routed_experts", nullptr},
      {"topk_group", 9},
      {"mlp_bias", true},
      {"routed_scaling_factor", -1.0},
      {"first_k_dense_replace", 62},
      {"num_key_value_heads", 64},
      {"qk_head_dim", 128},
      {"head_dim", 128},
      {"num_mtp_layers", 2},
      {"num_experts", 128},
  };
  for (const auto& [key, value] : cases) {
    Json object = deepseek_json();
    object[key] = value;
    EXPECT_EQ(refused_field(object), key) << key << " = " << value;
  }
  Json object = deepseek_json();
  object["rope_scaling"] = {{"type", "fourier"}};
  EXPECT_EQ(refused_field(object), "rope_type");
}

TEST(HfConfig, WritesNoModelWithLatentAttention) {
  ModelSpec spec = model_from_hf_config(deepseek_json(), "config.json");
  EXPECT_THROW(to_hf_config(spec, 4096), InvalidInput);
  spec.family = "native";
  EXPECT_THROW(to_hf_config(spec, 4096), InvalidInput);
}

TEST(HfConfig, WritesWhatItReads) {
  for (const Json& object : {mixtral_json(), qwen_json()}) {
    const ModelSpec spec = model_from_hf_config(object, "config.json");
    const Json written = to_hf_config(spec, 4096);
    EXPECT_EQ(model_from_hf_config(written, "written"), spec);
    EXPECT_EQ(written.at("max_position_embeddings"), 4096);
  }
}

TEST(HfConfig, WritesANativeModelAsTheFamilyThatFits) {
  ModelSpec spec = model_from_hf_config(mixtral_json(), "config.json");
  spec.family = "native";
  EXPECT_EQ(to_hf_config(spec, 64).at("model_type"), "mixtral");
  spec.qk_norm = true;
  EXPECT_EQ(to_hf_config(spec, 64).at("model_type"), "qwen3_moe");
  spec.shared_ffn = 64;
  EXPECT_THROW(to_hf_config(spec, 64), InvalidInput) << "neither family has a shared expert";
  spec.shared_ffn = 0;
  spec.qk_norm = false;
  spec.norm_topk_prob = false;
  EXPECT_THROW(to_hf_config(spec, 64), InvalidInput) << "mixtral normalises, qwen3_moe has qk_norm";
}

}  // namespace
}  // namespace bagualu
