// Families of Hugging Face with experts in most layers: mixtral, qwen2_moe, qwen3_moe, olmoe,
// granitemoe, gpt_oss, llama4.

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "bagualu/model/hf_config_reader.h"

namespace bagualu {
namespace {

constexpr int64_t kMaxWidth = int64_t{1} << 20;

std::vector<uint8_t> no_layer(const ModelSpec& spec) {
  return std::vector<uint8_t>(static_cast<size_t>(spec.layers), 0);
}

/// `decoder_sparse_step` and `mlp_only_layers` say which layers are dense.
void read_qwen_layers(HfReader& reader, ModelSpec* spec) {
  JsonReader& json = reader.json();
  const int64_t step = json.int64_or("decoder_sparse_step", 1, 1);
  for (int64_t layer = 0; layer < spec->layers; ++layer) {
    if ((layer + 1) % step != 0) spec->moe_layer[static_cast<size_t>(layer)] = 0;
  }
  for (const int64_t layer : json.int64_list_or("mlp_only_layers", {}, 0, spec->layers - 1)) {
    spec->moe_layer[static_cast<size_t>(layer)] = 0;
  }
  // The file always carries this width; it means nothing when every layer has experts.
  if (spec->moe_layers() < spec->layers) {
    spec->dense_ffn = json.int64("intermediate_size", 1, kMaxWidth);
  } else {
    reader.ignore({"intermediate_size"});
  }
}

/// qwen2_moe windows every other layer of the first max_window_layers, qwen3_moe all.
void read_qwen_window(HfReader& reader, ModelSpec* spec) {
  JsonReader& json = reader.json();
  const bool use = json.boolean_or("use_sliding_window", false);
  if (!use) reader.ignore({"sliding_window"});
  const int64_t window = use ? json.int64_or("sliding_window", 0, 0, INT32_MAX) : 0;
  if (spec->family == "qwen3_moe") {
    reader.ignore({"max_window_layers"});
    set_window(reader, window, {}, spec);
    return;
  }
  const int64_t last = json.int64_or("max_window_layers", 28, 0, INT32_MAX);
  std::vector<uint8_t> windowed = no_layer(*spec);
  for (int64_t layer = 0; layer < std::min(last, spec->layers); layer += 2) {
    windowed[static_cast<size_t>(layer)] = 1;
  }
  set_window(reader, window, std::move(windowed), spec);
}

/// A list of layers, or every n-th one.
void read_llama4_layers(HfReader& reader, ModelSpec* spec) {
  JsonReader& json = reader.json();
  const int64_t step = json.int64_or("interleave_moe_layer_step", 1, 1);
  std::vector<uint8_t> moe = no_layer(*spec);
  if (json.has("moe_layers")) {
    for (const int64_t layer : json.int64_list("moe_layers", 0, spec->layers - 1)) {
      moe[static_cast<size_t>(layer)] = 1;
    }
  } else {
    for (int64_t layer = step - 1; layer < spec->layers; layer += step) {
      moe[static_cast<size_t>(layer)] = 1;
    }
  }
  spec->moe_layer = std::move(moe);
  if (spec->moe_layers() < spec->layers) {
    spec->dense_ffn = json.int64("intermediate_size_mlp", 1, kMaxWidth);
  } else {
    reader.ignore({"intermediate_size_mlp"});
  }
}

/// Layers with RoPE attend within chunks, those without to everything.
void read_llama4_chunks(HfReader& reader, ModelSpec* spec) {
  JsonReader& json = reader.json();
  const bool unset = !reader.contains("attention_chunk_size");
  const int64_t chunk = unset ? 8192 : json.int64_or("attention_chunk_size", 0, 1, INT32_MAX);
  const int64_t interval = json.int64_or("no_rope_layer_interval", 4, 1);
  const std::vector<int64_t> listed = json.int64_list_or("no_rope_layers", {}, 0, 1);
  reader.expect(listed.empty() || static_cast<int64_t>(listed.size()) >= spec->layers,
                "no_rope_layers",
                fmt::format("none, or one entry per layer ({}): 1 = RoPE", spec->layers));
  std::vector<uint8_t> chunked = no_layer(*spec);
  for (int64_t layer = 0; layer < spec->layers; ++layer) {
    const auto at = static_cast<size_t>(layer);
    chunked[at] = listed.empty() ? (layer + 1) % interval != 0 : listed[at] != 0;
  }
  set_window(reader, chunk, std::move(chunked), spec);
}

}  // namespace

void read_mixtral(HfReader& reader, ModelSpec* spec) {
  read_shape(reader, {.rope_theta = 1e6, .rms_eps = 1e-5}, spec);
  read_experts(reader, spec);
  JsonReader& json = reader.json();
  spec->expert_ffn = json.int64("intermediate_size", 1, kMaxWidth);
  spec->norm_topk_prob = true;
  set_window(reader, json.int64_or("sliding_window", 0, 0, INT32_MAX), {}, spec);
}

void read_qwen_moe(HfReader& reader, ModelSpec* spec) {
  const bool qwen3 = spec->family == "qwen3_moe";
  read_shape(reader, {}, spec);
  read_experts(reader, spec);
  JsonReader& json = reader.json();
  spec->expert_ffn = json.int64("moe_intermediate_size", 1, kMaxWidth);
  spec->norm_topk_prob = json.boolean_or("norm_topk_prob", false);
  spec->qk_norm = qwen3;
  if (qwen3) {
    spec->qkv_bias = spec->attn_out_bias = json.boolean_or("attention_bias", false);
  } else {
    spec->qkv_bias = json.boolean_or("qkv_bias", true);
    spec->shared_ffn = json.int64("shared_expert_intermediate_size", 1, kMaxWidth);
    spec->shared_gate = true;
  }
  read_qwen_layers(reader, spec);
  read_qwen_window(reader, spec);
  if (reader.use() == ModelUse::kPlan) drop_unused_experts(spec);
}

void read_olmoe(HfReader& reader, ModelSpec* spec) {
  read_shape(reader, {.rms_eps = 1e-5}, spec);
  read_experts(reader, spec);
  JsonReader& json = reader.json();
  spec->expert_ffn = json.int64("intermediate_size", 1, kMaxWidth);
  spec->norm_topk_prob = json.boolean_or("norm_topk_prob", false);
  spec->qk_norm = spec->qk_norm_full_width = true;
  spec->qkv_bias = spec->attn_out_bias = json.boolean_or("attention_bias", false);
  reader.ignore({"clip_qkv"});
}

void read_granitemoe(HfReader& reader, ModelSpec* spec) {
  read_shape(reader, {}, spec);
  read_experts(reader, spec);
  JsonReader& json = reader.json();
  spec->expert_ffn = json.int64("intermediate_size", 1, kMaxWidth);
  spec->norm_topk_prob = true;  // softmax over the chosen experts alone
  spec->qkv_bias = spec->attn_out_bias = json.boolean_or("attention_bias", false);
  reader.ignore(
      {"embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"});
}

void read_gpt_oss(HfReader& reader, ModelSpec* spec) {
  read_shape(reader, {.rope_theta = 150000.0, .rms_eps = 1e-5, .head_dim = 64}, spec);
  read_experts(reader, spec);
  JsonReader& json = reader.json();
  spec->expert_ffn = json.int64("intermediate_size", 1, kMaxWidth);
  spec->norm_topk_prob = true;  // softmax over the chosen experts alone
  spec->qkv_bias = spec->attn_out_bias = json.boolean_or("attention_bias", true);
  spec->mlp_bias = spec->router_bias = spec->attn_sinks = true;
  const bool unset = !reader.contains("sliding_window");
  const int64_t window = unset ? 128 : json.int64_or("sliding_window", 0, 1, INT32_MAX);
  std::vector<uint8_t> windowed = no_layer(*spec);
  for (int64_t layer = 0; layer < spec->layers; layer += 2) {
    windowed[static_cast<size_t>(layer)] = 1;
  }
  set_window(reader, window, std::move(windowed), spec);
  reader.ignore({"swiglu_alpha", "swiglu_limit", "initial_context_length", "experts_per_token"});
}

void read_llama4(HfReader& reader, ModelSpec* spec) {
  read_shape(reader, {.rope_theta = 5e5, .rms_eps = 1e-5, .head_dim = 128}, spec);
  read_experts(reader, spec);
  JsonReader& json = reader.json();
  spec->expert_ffn = spec->shared_ffn = json.int64("intermediate_size", 1, kMaxWidth);
  spec->norm_topk_prob = false;  // sigmoid scores
  spec->qkv_bias = spec->attn_out_bias = json.boolean_or("attention_bias", false);
  spec->qk_norm = spec->qk_norm_weightless = json.boolean_or("use_qk_norm", true);
  read_llama4_layers(reader, spec);
  read_llama4_chunks(reader, spec);
  reader.ignore({"attn_temperature_tuning", "floor_scale", "attn_scale", "for_llm_compressor"});
  drop_unused_experts(spec);
}

}  // namespace bagualu
