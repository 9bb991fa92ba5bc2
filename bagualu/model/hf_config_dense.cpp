// Dense families of Hugging Face: llama, qwen2, qwen3, mistral.

#include <vector>

#include "bagualu/model/hf_config_reader.h"

namespace bagualu {
namespace {

constexpr int64_t kMaxWidth = int64_t{1} << 20;
constexpr int64_t kDefaultWindow = 4096;  // of a file of these families that has no such key

/// `sliding_window`: absent means the class default, null none.
int64_t window_of(HfReader& reader, int64_t absent) {
  JsonReader& json = reader.json();
  if (json.has("sliding_window")) return json.int64("sliding_window", 0, INT32_MAX);
  return reader.contains("sliding_window") ? 0 : absent;
}

}  // namespace

void read_llama(HfReader& reader, ModelSpec* spec) {
  read_shape(reader, {}, spec);
  JsonReader& json = reader.json();
  spec->dense_ffn = json.int64("intermediate_size", 1, kMaxWidth);
  spec->qkv_bias = spec->attn_out_bias = json.boolean_or("attention_bias", false);
  spec->mlp_bias = json.boolean_or("mlp_bias", false);
}

void read_qwen_dense(HfReader& reader, ModelSpec* spec) {
  const bool qwen3 = spec->family == "qwen3";
  read_shape(reader, {.head_dim = qwen3 ? 128 : 0}, spec);
  JsonReader& json = reader.json();
  spec->dense_ffn = json.int64("intermediate_size", 1, kMaxWidth);
  spec->qk_norm = qwen3;
  spec->qkv_bias = qwen3 ? json.boolean_or("attention_bias", false) : true;
  spec->attn_out_bias = qwen3 && spec->qkv_bias;
  const bool use = json.boolean_or("use_sliding_window", false);
  const int64_t window = use ? window_of(reader, kDefaultWindow) : 0;
  const int64_t full = json.int64_or("max_window_layers", 28, 0, INT32_MAX);
  std::vector<uint8_t> windowed(static_cast<size_t>(spec->layers), 0);
  for (int64_t layer = full; layer < spec->layers; ++layer) {
    windowed[static_cast<size_t>(layer)] = 1;
  }
  if (!use) reader.ignore({"sliding_window", "max_window_layers"});
  set_window(reader, window, std::move(windowed), spec);
}

void read_mistral(HfReader& reader, ModelSpec* spec) {
  read_shape(reader, {}, spec);
  spec->dense_ffn = reader.json().int64("intermediate_size", 1, kMaxWidth);
  set_window(reader, window_of(reader, kDefaultWindow), {}, spec);
}

}  // namespace bagualu
