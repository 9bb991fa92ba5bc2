// Families of Hugging Face with routed and shared experts behind dense layers: deepseek_v2,
// deepseek_v3, kimi_k2 (latent attention) and glm4_moe (grouped-query attention).

#include <algorithm>

#include "bagualu/model/hf_config_reader.h"

namespace bagualu {
namespace {

constexpr int64_t kMaxWidth = int64_t{1} << 20;

/// Settings of the router: bytes and FLOPs are the same under all of them, so a planner needs none,
/// but a value nobody knows may be a model of another shape.
void check_router(HfReader& reader) {
  JsonReader& json = reader.json();
  reader.expect_one_of("scoring_func", {"softmax", "sigmoid"});
  reader.expect_one_of("topk_method", {"greedy", "group_limited_greedy", "noaux_tc"});
  json.number_or("routed_scaling_factor", 1.0, 1e-6, 1e6);
  const int64_t groups = json.int64_or("n_group", 1, 1);
  if (json.has("n_group")) {
    json.int64_or("topk_group", 1, 1, groups);
  }
  reader.expect(json.int64_or("moe_layer_freq", 1) == 1, "moe_layer_freq", "1");
  reader.ignore({"scoring_func", "topk_method", "routed_scaling_factor", "n_group", "topk_group",
                 "moe_layer_freq", "aux_loss_alpha", "seq_aux", "ep_size"});
}

/// Experts of `moe_intermediate_size`, shared ones beside them, the first layers dense, prediction
/// layers behind the last.
void read_layers(HfReader& reader, ModelSpec* spec) {
  JsonReader& json = reader.json();
  read_experts(reader, spec);
  spec->expert_ffn = json.int64("moe_intermediate_size", 1, kMaxWidth);
  spec->shared_ffn = json.int64_or("n_shared_experts", 0, 0, 4096) * spec->expert_ffn;
  const int64_t dense = json.int64_or("first_k_dense_replace", 0, 0, spec->layers);
  std::fill_n(spec->moe_layer.begin(), dense, uint8_t{0});
  if (dense > 0) {
    spec->dense_ffn = json.int64("intermediate_size", 1, kMaxWidth);
  } else {
    reader.ignore({"intermediate_size"});
  }
  // transformers has such layers for decoding only; they are trained, so they are planned.
  spec->mtp_layers = reader.alias({"num_nextn_predict_layers", "num_mtp_layers"}, 0, 16);
  check_router(reader);
  drop_unused_experts(spec);
}

}  // namespace

void read_deepseek(HfReader& reader, ModelSpec* spec) {
  read_shape(reader, {}, spec);
  JsonReader& json = reader.json();
  spec->q_lora_rank = json.int64_or("q_lora_rank", 0, 1, kMaxWidth);
  spec->kv_lora_rank = json.int64("kv_lora_rank", 1, kMaxWidth);
  spec->qk_nope_head_dim = json.int64("qk_nope_head_dim", 1, kMaxWidth);
  spec->qk_rope_head_dim = json.int64("qk_rope_head_dim", 1, kMaxWidth);
  spec->v_head_dim = json.int64("v_head_dim", 1, kMaxWidth);
  const int64_t head_dim = spec->qk_nope_head_dim + spec->qk_rope_head_dim;
  reader.expect(json.int64_or("qk_head_dim", head_dim) == head_dim, "qk_head_dim",
                "qk_nope_head_dim + qk_rope_head_dim");
  // `head_dim` of these files is the rotated part alone, where transformers writes it.
  reader.expect(!json.has("head_dim") || spec->head_dim == spec->qk_rope_head_dim ||
                    spec->head_dim == head_dim,
                "head_dim", "qk_rope_head_dim, which is what transformers means by it here");
  spec->head_dim = head_dim;
  reader.expect(spec->kv_heads == spec->heads, "num_key_value_heads",
                "num_attention_heads, since every head has keys of its own");
  spec->qkv_bias = spec->attn_out_bias = json.boolean_or("attention_bias", false);
  reader.expect(!json.boolean_or("mlp_bias", false), "mlp_bias",
                "false (a bias on shared but not on routed experts is not supported)");
  read_layers(reader, spec);
  spec->norm_topk_prob = json.boolean_or("norm_topk_prob", spec->family != "deepseek_v2");
}

void read_glm4_moe(HfReader& reader, ModelSpec* spec) {
  read_shape(reader, {.rms_eps = 1e-5}, spec);
  JsonReader& json = reader.json();
  spec->qkv_bias = json.boolean_or("attention_bias", false);
  spec->qk_norm = json.boolean_or("use_qk_norm", false);
  read_layers(reader, spec);
  spec->norm_topk_prob = json.boolean_or("norm_topk_prob", true);
}

}  // namespace bagualu
