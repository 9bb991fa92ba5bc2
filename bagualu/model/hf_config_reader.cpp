#include "bagualu/model/hf_config_reader.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxSize = int64_t{1} << 24;

// A value of any type in a message.
std::string shown(const Json& value) {
  std::string text = value.is_structured()
                         ? std::string(value.is_array() ? "a list" : "an object")
                         : value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() > 60 ? text.substr(0, 60) + "..." : text;
}

/// Refuses what changes the mathematics of training and is not implemented.
void refuse_for_training(HfReader& reader) {
  JsonReader& json = reader.json();
  reader.expect(json.string_or("hidden_act", "silu") == "silu", "hidden_act", "silu");
  reader.expect(!json.boolean_or("attention_bias", false), "attention_bias",
                "false (biases are not supported yet)");
  for (const char* key : {"attention_dropout", "router_jitter_noise"}) {
    reader.expect(json.number_or(key, 0.0) == 0.0, key,
                  "0 (not supported yet; hidden-state dropout is a training option)");
  }
  reader.expect(json.number_or("partial_rotary_factor", 1.0) == 1.0, "partial_rotary_factor", "1");
  if (json.boolean_or("use_sliding_window", true) && json.has("sliding_window")) {
    const int64_t positions = json.int64_or("max_position_embeddings", 0);
    reader.expect(positions > 0 && json.int64("sliding_window") >= positions, "sliding_window",
                  "null, or at least max_position_embeddings (windowed attention is not supported "
                  "yet)");
  }
}

/// "full_attention" and one windowed kind, one per layer; empty if the key is absent.
std::vector<uint8_t> windowed_by_types(HfReader& reader, int64_t layers) {
  const Json& types = reader.json().raw("layer_types");
  if (types.is_null()) return {};
  reader.expect(types.is_array() && static_cast<int64_t>(types.size()) == layers, "layer_types",
                fmt::format("a list of num_hidden_layers = {} names", layers));
  std::vector<uint8_t> windowed;
  for (const Json& type : types) {
    const bool window = type == "sliding_attention" || type == "chunked_attention";
    if (!window && type != "full_attention") {
      throw InvalidInput(reader.json().where(), fmt::format("layer_types[{}]", windowed.size()),
                         shown(type), "full_attention, sliding_attention, chunked_attention");
    }
    windowed.push_back(window ? 1 : 0);
  }
  return windowed;
}

}  // namespace

HfReader::HfReader(const Json& object, std::string where, ModelUse use, std::string prefix)
    : object_(object), json_(object, std::move(where)), use_(use), prefix_(std::move(prefix)) {}

void HfReader::ignore(std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    if (json_.has(key)) ignored_.emplace_back(key);
  }
}

void HfReader::ignore_common() {
  ignore({"architectures",
          "auto_map",
          "transformers_version",
          "torch_dtype",
          "dtype",
          "quantization_config",
          "initializer_range",
          "max_position_embeddings",
          "use_cache",
          "pretraining_tp",
          "bos_token_id",
          "eos_token_id",
          "pad_token_id",
          "sep_token_id",
          "decoder_start_token_id",
          "tokenizer_class",
          "_attn_implementation",
          "_attn_implementation_autoset",
          "attn_implementation",
          "cache_implementation",
          "rope_interleave",
          "partial_rotary_factor",
          "tie_last_hidden_states",
          "attention_dropout",
          "router_jitter_noise"});
  // What transformers 4 wrote for a nested config, generation settings included; and the marks of
  // fine-tuning tools.
  ignore({"add_cross_attention",
          "bad_words_ids",
          "begin_suppress_tokens",
          "chunk_size_feed_forward",
          "cross_attention_hidden_size",
          "diversity_penalty",
          "do_sample",
          "early_stopping",
          "encoder_no_repeat_ngram_size",
          "exponential_decay_length_penalty",
          "finetuning_task",
          "forced_bos_token_id",
          "forced_eos_token_id",
          "id2label",
          "is_decoder",
          "is_encoder_decoder",
          "label2id",
          "length_penalty",
          "max_length",
          "min_length",
          "no_repeat_ngram_size",
          "num_beam_groups",
          "num_beams",
          "num_return_sequences",
          "output_attentions",
          "output_hidden_states",
          "output_scores",
          "prefix",
          "problem_type",
          "pruned_heads",
          "remove_invalid_values",
          "repetition_penalty",
          "return_dict",
          "return_dict_in_generate",
          "suppress_tokens",
          "task_specific_params",
          "temperature",
          "tf_legacy_loss",
          "tie_encoder_decoder",
          "top_k",
          "top_p",
          "torchscript",
          "typical_p",
          "use_bfloat16",
          "unsloth_fixed",
          "unsloth_version"});
}

int64_t HfReader::alias(std::initializer_list<const char*> names, int64_t min, int64_t max) {
  int64_t value = 0;
  const char* first = nullptr;
  for (const char* name : names) {
    if (!json_.has(name)) continue;
    const int64_t found = json_.int64(name, min, max);
    if (first != nullptr && found != value) {
      throw InvalidInput(json_.where(), name, fmt::format("{}", found),
                         fmt::format("{}, as {} says", value, first));
    }
    value = found;
    first = name;
  }
  return value;
}

void HfReader::expect(bool ok, const std::string& key, const std::string& allowed) {
  if (ok) return;
  const auto found = object_.find(key);
  throw InvalidInput(json_.where(), key, found == object_.end() ? "nothing" : shown(*found),
                     allowed);
}

void HfReader::expect_one_of(const char* key, std::initializer_list<std::string_view> allowed) {
  if (!json_.has(key)) return;
  const std::string found = json_.string(key);
  expect(std::find(allowed.begin(), allowed.end(), found) != allowed.end(), key,
         fmt::format("{}", fmt::join(allowed, ", ")));
}

std::vector<std::string> HfReader::finish() {
  json_.finish();
  std::vector<std::string> ordered;
  for (const auto& [key, value] : object_.items()) {
    if (std::find(ignored_.begin(), ignored_.end(), key) != ignored_.end()) {
      ordered.push_back(prefix_ + key);
    }
  }
  return ordered;
}

double read_rope(HfReader& reader, double fallback) {
  JsonReader& json = reader.json();
  const double top_level = json.number_or("rope_theta", fallback);
  double theta = top_level;
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    if (!json.has(key)) continue;
    JsonReader rope(json.object(key), json.where() + "." + key);
    const std::string type = rope.string_or("rope_type", rope.string_or("type", "default"));
    const double partial = rope.number_or("partial_rotary_factor", 1.0, 0.0, 1.0);
    const std::vector<std::string> known =
        reader.use() == ModelUse::kTrain
            ? std::vector<std::string>{"default"}
            : std::vector<std::string>{"default",  "linear", "dynamic",     "yarn",
                                       "longrope", "llama3", "proportional"};
    if (std::find(known.begin(), known.end(), type) == known.end()) {
      throw InvalidInput(rope.where(), "rope_type", type,
                         fmt::format("{}", fmt::join(known, ", ")));
    }
    if (reader.use() == ModelUse::kTrain && partial != 1.0) {
      throw InvalidInput(rope.where(), "partial_rotary_factor", fmt::format("{}", partial), "1");
    }
    if (type != "default" || partial != 1.0) reader.ignore({key});
    theta = rope.number_or("rope_theta", theta);
    if (json.has("rope_theta") && theta != top_level) {
      throw InvalidInput(rope.where(), "rope_theta", fmt::format("{}", theta),
                         fmt::format("{}, as rope_theta beside it says", top_level));
    }
  }
  return theta;
}

void read_shape(HfReader& reader, const HfDefaults& defaults, ModelSpec* spec) {
  JsonReader& json = reader.json();
  if (reader.use() == ModelUse::kTrain) refuse_for_training(reader);
  spec->layers = json.int64("num_hidden_layers", 1, kMaxLayers);
  spec->hidden = json.int64("hidden_size", 1, kMaxSize);
  spec->heads = json.int64("num_attention_heads", 1, kMaxSize);
  spec->kv_heads = json.int64_or("num_key_value_heads", spec->heads, 1, kMaxSize);
  spec->head_dim = spec->hidden / spec->heads;
  if (json.has("head_dim")) {
    spec->head_dim = json.int64("head_dim", 1, kMaxSize);
  } else if (!reader.contains("head_dim") && defaults.head_dim > 0) {
    spec->head_dim = defaults.head_dim;
  }
  spec->vocab = json.int64("vocab_size", 1, kMaxSize);
  spec->rms_eps = json.number_or("rms_norm_eps", defaults.rms_eps);
  spec->rope_theta = read_rope(reader, defaults.rope_theta);
  spec->tied_embeddings = json.boolean_or("tie_word_embeddings", false);
  spec->name = json.string_or("_name_or_path", "");
  spec->moe_layer.assign(static_cast<size_t>(spec->layers), 0);
  // All families gate their MLPs, whatever function the gate applies.
  if (json.string_or("hidden_act", "silu") != "silu") reader.ignore({"hidden_act"});
  reader.ignore_common();
}

void read_experts(HfReader& reader, ModelSpec* spec) {
  JsonReader& json = reader.json();
  // transformers 5 writes num_local_experts for most families, 4 wrote the families' own names.
  const auto names = {"n_routed_experts", "num_experts", "num_local_experts"};
  spec->experts = reader.alias(names, 1, kMaxSize);
  const char* own = spec->family.starts_with("deepseek") || spec->family == "kimi_k2" ||
                            spec->family == "glm4_moe"
                        ? "n_routed_experts"
                        : "num_local_experts";
  reader.expect(spec->experts > 0, own, "an integer of at least 1");
  spec->top_k = json.int64("num_experts_per_tok", 1, kMaxSize);
  if (json.boolean_or("output_router_logits", false)) {
    spec->aux_loss_coef = json.number_or("router_aux_loss_coef", 0.001);
  } else {
    reader.ignore({"router_aux_loss_coef"});
  }
  spec->moe_layer.assign(static_cast<size_t>(spec->layers), 1);
}

void set_window(HfReader& reader, int64_t window, std::vector<uint8_t> windowed, ModelSpec* spec) {
  std::vector<uint8_t> typed = windowed_by_types(reader, spec->layers);
  const bool asked = std::find(typed.begin(), typed.end(), 1) != typed.end();
  reader.expect(!asked || window > 0, "layer_types", "full_attention only, as there is no window");
  const int64_t positions = reader.json().int64_or("max_position_embeddings", 0);
  if (window <= 0 || (positions > 0 && window >= positions)) return;
  if (!typed.empty()) {
    windowed = std::move(typed);
  } else if (windowed.empty()) {
    windowed.assign(static_cast<size_t>(spec->layers), 1);
  }
  if (std::find(windowed.begin(), windowed.end(), 1) == windowed.end()) return;
  spec->attention_window = window;
  spec->windowed_layer = std::move(windowed);
}

void drop_unused_experts(ModelSpec* spec) {
  if (spec->moe_layers() > 0) return;
  spec->experts = spec->top_k = spec->expert_ffn = spec->shared_ffn = 0;
  spec->shared_gate = spec->router_bias = false;
}

}  // namespace bagualu
