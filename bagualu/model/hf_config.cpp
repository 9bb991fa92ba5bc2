// Hugging Face config.json (transformers 5.24), families mixtral and qwen3_moe; and deepseek_v2,
// deepseek_v3, kimi_k2, which are read for planning only.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/model/model_spec.h"

namespace bagualu {
namespace {

constexpr const char* kFamilies = "mixtral, qwen3_moe, deepseek_v2, deepseek_v3 or kimi_k2";

// Note [Defaults of a config.json]
// transformers leaves a key out of old files when it equals the default of its class, so an absent
// key has a meaning per family. Sizes are the exception: a file without them is cut or foreign.
struct FamilyDefaults {
  double rope_theta;
  double rms_eps;
  bool norm_topk_prob;
};
constexpr FamilyDefaults kMixtral = {1e6, 1e-5, true};
constexpr FamilyDefaults kQwen3Moe = {1e4, 1e-6, false};
constexpr FamilyDefaults kDeepseekV2 = {1e4, 1e-6, false};
constexpr FamilyDefaults kDeepseekV3 = {1e4, 1e-6, true};  // kimi_k2 too: the same class

void refuse_unless(bool ok, const JsonReader& reader, const char* field, std::string found,
                   const char* allowed) {
  if (!ok) throw InvalidInput(reader.where(), field, std::move(found), allowed);
}

/// Refuses what changes the mathematics and is not implemented here.
void refuse_unsupported(JsonReader& reader) {
  const std::string act = reader.string_or("hidden_act", "silu");
  refuse_unless(act == "silu", reader, "hidden_act", act, "silu");
  refuse_unless(!reader.boolean_or("tie_word_embeddings", false), reader, "tie_word_embeddings",
                "true", "false (tied embeddings are not supported yet)");
  refuse_unless(!reader.boolean_or("attention_bias", false), reader, "attention_bias", "true",
                "false (biases are not supported yet)");
  for (const char* field : {"attention_dropout", "router_jitter_noise"}) {
    const double value = reader.number_or(field, 0.0);
    refuse_unless(value == 0.0, reader, field, fmt::format("{}", value),
                  "0 (not supported yet; hidden-state dropout is a training option)");
  }
  const bool sliding = reader.boolean_or("use_sliding_window", true);
  if (sliding && reader.has("sliding_window")) {
    const int64_t window = reader.int64("sliding_window");
    const int64_t positions = reader.int64_or("max_position_embeddings", 0);
    refuse_unless(positions > 0 && window >= positions, reader, "sliding_window",
                  fmt::format("{}", window),
                  "null, or at least max_position_embeddings (windowed attention is not supported "
                  "yet)");
  }
}

/// RoPE's base, from `rope_parameters` (transformers 5) or the top level (older files).
double rope_theta_of(JsonReader& reader, double fallback, bool yarn_is_fine = false) {
  const double top_level = reader.number_or("rope_theta", fallback);
  double theta = top_level;
  for (const char* field : {"rope_parameters", "rope_scaling"}) {
    if (!reader.has(field)) continue;
    JsonReader rope(reader.object(field), reader.where() + "." + field);
    const std::string type = rope.string_or("rope_type", rope.string_or("type", "default"));
    refuse_unless(type == "default" || (yarn_is_fine && type == "yarn"), rope, "rope_type", type,
                  yarn_is_fine ? "default or yarn" : "default (scaled RoPE is not supported yet)");
    theta = rope.number_or("rope_theta", top_level);
    const double partial = rope.number_or("partial_rotary_factor", 1.0);
    refuse_unless(partial == 1.0, rope, "partial_rotary_factor", fmt::format("{}", partial), "1");
  }
  return theta;
}

int64_t experts_of(JsonReader& reader) {
  // transformers 5 writes num_local_experts for both families, 4 wrote num_experts for Qwen.
  const bool old_name = !reader.has("num_local_experts") && reader.has("num_experts");
  return reader.int64(old_name ? "num_experts" : "num_local_experts", 1);
}

void read_common(JsonReader& reader, const FamilyDefaults& defaults, ModelSpec* spec) {
  spec->layers = reader.int64("num_hidden_layers", 1, 4096);
  spec->hidden = reader.int64("hidden_size", 1);
  spec->heads = reader.int64("num_attention_heads", 1);
  spec->kv_heads = reader.int64_or("num_key_value_heads", spec->heads, 1);
  spec->head_dim = reader.int64_or("head_dim", spec->hidden / spec->heads, 1);
  spec->vocab = reader.int64("vocab_size", 1);
  spec->experts = experts_of(reader);
  spec->top_k = reader.int64("num_experts_per_tok", 1);
  spec->rms_eps = reader.number_or("rms_norm_eps", defaults.rms_eps);
  spec->rope_theta = rope_theta_of(reader, defaults.rope_theta);
  spec->name = reader.string_or("_name_or_path", "");
  if (reader.boolean_or("output_router_logits", false)) {
    spec->aux_loss_coef = reader.number_or("router_aux_loss_coef", 0.001);
  }
  spec->moe_layer.assign(static_cast<size_t>(spec->layers), 1);
}

void read_mixtral(JsonReader& reader, ModelSpec* spec) {
  read_common(reader, kMixtral, spec);
  spec->expert_ffn = reader.int64("intermediate_size", 1);
  spec->norm_topk_prob = true;
}

void read_qwen3_moe(JsonReader& reader, ModelSpec* spec) {
  read_common(reader, kQwen3Moe, spec);
  spec->expert_ffn = reader.int64("moe_intermediate_size", 1);
  spec->norm_topk_prob = reader.boolean_or("norm_topk_prob", kQwen3Moe.norm_topk_prob);
  spec->qk_norm = true;
  const int64_t step = reader.int64_or("decoder_sparse_step", 1, 1);
  for (int64_t layer = 0; layer < spec->layers; ++layer) {
    if ((layer + 1) % step != 0) spec->moe_layer[static_cast<size_t>(layer)] = 0;
  }
  for (const int64_t layer : reader.int64_list_or("mlp_only_layers", {}, 0, spec->layers - 1)) {
    spec->moe_layer[static_cast<size_t>(layer)] = 0;
  }
  // The file always carries this width; it means nothing when every layer has experts.
  if (spec->moe_layers() < spec->layers) spec->dense_ffn = reader.int64("intermediate_size", 1);
}

/// Settings of a DeepSeek router: bytes and FLOPs are the same under all of them, so a planner
/// needs none, but a value nobody knows may be a model of another shape.
void check_deepseek_router(JsonReader& reader, bool v2) {
  const auto one_of = [&](const char* field, std::string fallback,
                          const std::vector<std::string>& allowed) {
    const std::string found = reader.string_or(field, std::move(fallback));
    if (std::find(allowed.begin(), allowed.end(), found) != allowed.end()) return;
    throw InvalidInput(reader.where(), field, found, fmt::format("{}", fmt::join(allowed, ", ")));
  };
  one_of("scoring_func", v2 ? "softmax" : "sigmoid", {"softmax", "sigmoid"});
  one_of("topk_method", v2 ? "greedy" : "noaux_tc", {"greedy", "group_limited_greedy", "noaux_tc"});
  reader.number_or("routed_scaling_factor", 1.0, 1e-6, 1e6);
  const int64_t groups = reader.int64_or("n_group", 1, 1);
  reader.int64_or("topk_group", 1, 1, groups);
  const int64_t every = reader.int64_or("moe_layer_freq", 1);
  refuse_unless(every == 1, reader, "moe_layer_freq", fmt::format("{}", every), "1");
}

void read_deepseek(JsonReader& reader, ModelSpec* spec) {
  const bool v2 = spec->family == "deepseek_v2";
  const FamilyDefaults& defaults = v2 ? kDeepseekV2 : kDeepseekV3;
  spec->layers = reader.int64("num_hidden_layers", 1, 4096);
  spec->hidden = reader.int64("hidden_size", 1);
  spec->heads = reader.int64("num_attention_heads", 1, int64_t{1} << 20);
  spec->kv_heads = reader.int64_or("num_key_value_heads", spec->heads, 1);
  refuse_unless(reader.has("q_lora_rank"), reader, "q_lora_rank", "null",
                "a number (queries without a latent are not supported yet)");
  spec->q_lora_rank = reader.int64("q_lora_rank", 1);
  spec->kv_lora_rank = reader.int64("kv_lora_rank", 1);
  spec->qk_nope_head_dim = reader.int64("qk_nope_head_dim", 1, int64_t{1} << 20);
  spec->qk_rope_head_dim = reader.int64("qk_rope_head_dim", 1, int64_t{1} << 20);
  spec->v_head_dim = reader.int64("v_head_dim", 1, int64_t{1} << 20);
  // `head_dim` of these files is the rotated part alone, where transformers writes it.
  spec->head_dim = spec->qk_nope_head_dim + spec->qk_rope_head_dim;
  spec->vocab = reader.int64("vocab_size", 1);
  spec->experts = reader.int64("n_routed_experts", 1);
  spec->top_k = reader.int64("num_experts_per_tok", 1);
  spec->expert_ffn = reader.int64("moe_intermediate_size", 1, int64_t{1} << 20);
  spec->shared_ffn = reader.int64_or("n_shared_experts", 0, 0, 4096) * spec->expert_ffn;
  spec->moe_layer.assign(static_cast<size_t>(spec->layers), 1);
  const int64_t dense = reader.int64("first_k_dense_replace", 0, spec->layers);
  std::fill_n(spec->moe_layer.begin(), dense, uint8_t{0});
  if (dense > 0) spec->dense_ffn = reader.int64("intermediate_size", 1);
  spec->norm_topk_prob = reader.boolean_or("norm_topk_prob", defaults.norm_topk_prob);
  spec->rms_eps = reader.number_or("rms_norm_eps", defaults.rms_eps);
  spec->rope_theta = rope_theta_of(reader, defaults.rope_theta, /*yarn_is_fine=*/true);
  spec->name = reader.string_or("_name_or_path", "");
  check_deepseek_router(reader, v2);
}

Json common_keys(const ModelSpec& spec, int64_t max_positions, const char* architecture,
                 const std::string& model_type) {
  return {{"architectures", {architecture}},
          {"model_type", model_type},
          {"vocab_size", spec.vocab},
          {"hidden_size", spec.hidden},
          {"num_hidden_layers", spec.layers},
          {"num_attention_heads", spec.heads},
          {"num_key_value_heads", spec.kv_heads},
          {"head_dim", spec.head_dim},
          {"hidden_act", "silu"},
          {"max_position_embeddings", max_positions},
          {"rms_norm_eps", spec.rms_eps},
          {"rope_parameters", {{"rope_theta", spec.rope_theta}, {"rope_type", "default"}}},
          {"tie_word_embeddings", false},
          {"sliding_window", nullptr},
          {"attention_dropout", 0.0},
          {"num_local_experts", spec.experts},
          {"num_experts_per_tok", spec.top_k},
          {"output_router_logits", spec.aux_loss_coef > 0},
          {"router_aux_loss_coef", spec.aux_loss_coef},
          {"dtype", "float32"},
          {"transformers_version", "5.24.0"}};
}

}  // namespace

ModelSpec model_from_hf_config(const Json& object, const std::string& where) {
  JsonReader reader(object, where);
  ModelSpec spec;
  spec.family = reader.string("model_type");
  const bool deepseek =
      spec.family == "deepseek_v2" || spec.family == "deepseek_v3" || spec.family == "kimi_k2";
  if (!deepseek && spec.family != "mixtral" && spec.family != "qwen3_moe") {
    throw InvalidInput(where, "model_type", spec.family, kFamilies);
  }
  refuse_unsupported(reader);
  if (deepseek) {
    read_deepseek(reader, &spec);
  } else if (spec.family == "mixtral") {
    read_mixtral(reader, &spec);
  } else {
    read_qwen3_moe(reader, &spec);
  }
  validate(spec, where);
  return spec;
}

Json to_hf_config(const ModelSpec& spec, int64_t max_positions) {
  ModelSpec exported = spec;
  if (exported.family == "native") {
    const bool mixtral = !spec.qk_norm && spec.norm_topk_prob && spec.moe_layers() == spec.layers;
    exported.family = mixtral ? "mixtral" : "qwen3_moe";
  }
  validate(exported, "export to Hugging Face");
  if (exported.has_mla()) {
    throw InvalidInput("export to Hugging Face", "family", exported.family, "mixtral, qwen3_moe");
  }
  if (exported.family == "mixtral") {
    Json config = common_keys(exported, max_positions, "MixtralForCausalLM", "mixtral");
    config["intermediate_size"] = exported.expert_ffn;
    config["router_jitter_noise"] = 0.0;
    return config;
  }
  std::vector<int64_t> dense_layers;
  for (int64_t layer = 0; layer < exported.layers; ++layer) {
    if (!exported.is_moe(layer)) dense_layers.push_back(layer);
  }
  Json config = common_keys(exported, max_positions, "Qwen3MoeForCausalLM", "qwen3_moe");
  config["moe_intermediate_size"] = exported.expert_ffn;
  // Without dense layers nothing reads this width, but the key has to be there.
  config["intermediate_size"] = exported.dense_ffn > 0 ? exported.dense_ffn : exported.expert_ffn;
  config["norm_topk_prob"] = exported.norm_topk_prob;
  config["decoder_sparse_step"] = 1;
  config["mlp_only_layers"] = dense_layers;
  config["attention_bias"] = false;
  config["use_sliding_window"] = false;
  return config;
}

}  // namespace bagualu
