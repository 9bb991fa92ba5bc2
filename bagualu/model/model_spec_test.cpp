#include "bagualu/model/model_spec.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/model/parameter_layout.h"

namespace bagualu {
namespace {

std::string preset(const std::string& name) {
  return std::string(BAGUALU_SOURCE_DIR) + "/configs/models/" + name + ".json";
}

Json tiny_json() { return read_json_file(preset("tiny")); }

/// The field that model_from_json complains about, or "" if it accepts the object.
std::string refused_field(const Json& object) {
  try {
    model_from_json(object, "test");
  } catch (const InvalidInput& error) {
    EXPECT_EQ(error.where(), "test");
    return error.field();
  }
  return "";
}

TEST(ModelSpec, ReadsTheTinyPreset) {
  const ModelSpec spec = model_from_file(preset("tiny"));
  EXPECT_EQ(spec.name, "tiny");
  EXPECT_EQ(spec.layers, 4);
  EXPECT_EQ(spec.moe_layer, (std::vector<uint8_t>{0, 1, 1, 1}));
  EXPECT_EQ(spec.moe_layers(), 3);
  EXPECT_FALSE(spec.is_moe(0));
  EXPECT_EQ(spec.q_width(), 64);
  EXPECT_EQ(spec.qkv_width(), 128);  // (4 + 2 * 2) * 16
}

TEST(ModelSpec, EveryPresetSurvivesARoundTrip) {
  for (const char* name : {"tiny", "demo", "mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b",
                           "qwen3-235b-a22b", "deepseek-v3", "kimi-k2"}) {
    const ModelSpec spec = model_from_file(preset(name));
    EXPECT_EQ(spec.name, name);
    EXPECT_EQ(model_from_json(to_json(spec), "copy"), spec);
    EXPECT_EQ(to_json(spec), read_json_file(preset(name))) << "the file leaves no key to defaults";
  }
}

TEST(ModelSpec, DefaultsAreThoseOfTheStruct) {
  Json object = tiny_json();
  for (const char* key : {"version", "family", "qk_norm", "norm_topk_prob", "rms_eps", "rope_theta",
                          "dropout", "aux_loss_coef", "z_loss_coef", "router_bias_rate"}) {
    object.erase(key);
  }
  EXPECT_EQ(model_from_json(object, "test"), model_from_json(tiny_json(), "test"));
}

TEST(ModelSpec, RefusesBadValuesNamingTheField) {
  struct Case {
    const char* key;
    Json value;
    const char* field;  // that the message names
  };
  const std::vector<Case> cases = {
      {"version", 2, "version"},
      {"layers", 0, "layers"},
      {"layers", -4, "layers"},
      {"layers", 4.5, "layers"},
      {"layers", "4", "layers"},
      {"layers", 1000000, "layers"},
      {"hidden", 72, "hidden"},  // 72 = 4.5 * 16
      {"hidden", int64_t{1} << 40, "hidden"},
      {"heads", 3, "heads"},  // not a multiple of 2 kv heads
      {"kv_heads", 0, "kv_heads"},
      {"head_dim", 8, "head_dim"},
      {"head_dim", 1 << 19, "heads * head_dim"},
      {"vocab", 1, "vocab"},
      {"experts", -1, "experts"},
      {"experts", 65537, "experts"},
      {"top_k", 0, "top_k"},
      {"top_k", 9, "top_k"},
      {"expert_ffn", 40, "expert_ffn"},
      {"shared_ffn", 40, "shared_ffn"},
      {"shared_ffn", -16, "shared_ffn"},
      {"dense_ffn", 40, "dense_ffn"},
      {"dense_ffn", 0, "dense_ffn"},  // layer 0 is dense
      {"dense_layers", Json::array(), "dense_ffn"},
      {"dense_layers", {4}, "dense_layers[0]"},
      {"dense_layers", {0, -1}, "dense_layers[1]"},
      {"dense_layers", {0, 1, 2, 3}, "dense_layers"},
      {"dense_layers", {0, 0}, "dense_layers"},
      {"qk_norm", 1, "qk_norm"},
      {"rms_eps", 0, "rms_eps"},
      {"rope_theta", 1, "rope_theta"},
      {"dropout", 1.0, "dropout"},
      {"dropout", -0.1, "dropout"},
      {"aux_loss_coef", -1, "aux_loss_coef"},
      {"z_loss_coef", -1, "z_loss_coef"},
      {"router_bias_rate", -1, "router_bias_rate"},
      {"family", "gpt99", "family"},
      {"family", "mixtral", "shared_ffn"},
      {"hiden", 64, "hiden"},
  };
  for (const Case& c : cases) {
    Json object = tiny_json();
    object[c.key] = c.value;
    EXPECT_EQ(refused_field(object), c.field) << c.key << " = " << c.value;
  }
}

TEST(ModelSpec, RefusesAMissingSize) {
  for (const char* key : {"layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "experts",
                          "top_k", "expert_ffn"}) {
    Json object = tiny_json();
    object.erase(key);
    EXPECT_EQ(refused_field(object), key);
  }
}

TEST(ModelSpec, RefusesAFamilyThatCannotExpressIt) {
  Json object = read_json_file(preset("mixtral-8x7b"));
  object["qk_norm"] = true;
  EXPECT_EQ(refused_field(object), "qk_norm");
  object["qk_norm"] = false;
  object["norm_topk_prob"] = false;
  EXPECT_EQ(refused_field(object), "norm_topk_prob");
  object["norm_topk_prob"] = true;
  object["dense_layers"] = {0};
  object["dense_ffn"] = 64;
  EXPECT_EQ(refused_field(object), "dense_layers");
}

TEST(ModelSpec, ReadsLatentAttention) {
  const ModelSpec spec = model_from_file(preset("deepseek-v3"));
  EXPECT_TRUE(spec.has_mla());
  EXPECT_EQ(spec.q_width(), 128 * 192);
  EXPECT_EQ(spec.attn_out_width(), 128 * 128);
  EXPECT_EQ(spec.kv_down_width(), 576);
  EXPECT_EQ(spec.kv_up_width(), 128 * 256);
  EXPECT_EQ(spec.rope_dim(), 64);
  const ModelSpec without = model_from_file(preset("tiny"));
  EXPECT_FALSE(without.has_mla());
  EXPECT_EQ(without.attn_out_width(), without.q_width());
  EXPECT_EQ(without.rope_dim(), without.head_dim);
}

TEST(ModelSpec, RefusesHalfOrContradictoryLatentAttention) {
  const Json good = read_json_file(preset("deepseek-v3"));
  for (const char* key : {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}) {
    Json object = good;
    object.erase(key);
    EXPECT_EQ(refused_field(object), key);
    object[key] = -16;
    EXPECT_EQ(refused_field(object), key);
    object = tiny_json();
    object[key] = 64;  // the others are missing
    EXPECT_NE(refused_field(object), "") << key;
  }
  const std::vector<std::pair<const char*, Json>> cases = {
      {"kv_heads", 64}, {"head_dim", 128}, {"qk_norm", true}, {"family", "qwen3_moe"}};
  for (const auto& [key, value] : cases) {
    Json object = good;
    object[key] = value;
    const std::string field = std::string(key) == "family" ? "kv_lora_rank" : key;
    EXPECT_EQ(refused_field(object), field);
  }
  Json object = tiny_json();
  object["family"] = "deepseek_v3";
  EXPECT_EQ(refused_field(object), "kv_lora_rank");
}

TEST(ModelSpec, RefusesASizeThatNoIntegerHolds) {
  ModelSpec spec = model_from_file(preset("tiny"));
  spec.hidden = spec.expert_ffn = int64_t{1} << 20;
  spec.experts = 4096;  // 3 * 2^12 * 2^20 * 2^20 = 1.4e16 per layer
  EXPECT_THROW(validate(spec, "test"), InvalidInput);
}

TEST(ModelSpec, RefusesALayerListOfAnotherLength) {
  ModelSpec spec = model_from_file(preset("tiny"));
  spec.moe_layer.pop_back();
  EXPECT_THROW(validate(spec, "test"), InvalidInput);
}

}  // namespace
}  // namespace bagualu
