#include "bagualu/model/model_spec.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr int64_t kFormatVersion = 1;

// Limits that keep every product of dimensions inside int64; no published model comes near them.
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxWidth = int64_t{1} << 20;
constexpr int64_t kMaxVocab = int64_t{1} << 24;
constexpr int64_t kMaxExperts = 4096;  // a token's scores lie on the router kernel's stack
constexpr double kMaxParameters = 1e15;

/// Rows of GEMM operands stay 64-byte aligned in fp32, so that a chunk of rows gives the same bits
/// wherever it lies. Asked of models that the runtime trains; a planned one has the widths it has.
constexpr int64_t kWidthMultiple = 16;

/// Complaints about one spec.
class Checker {
 public:
  Checker(const std::string& where, bool trained) : where_(where), trained_(trained) {}

  void range(const char* field, int64_t value, int64_t min, int64_t max) const {
    if (value >= min && value <= max) return;
    fail(field, fmt::format("{}", value), fmt::format("an integer from {} to {}", min, max));
  }
  void width(const char* field, int64_t value) const {
    range(field, value, 1, kMaxWidth);
    if (!trained_ || value % kWidthMultiple == 0) return;
    fail(field, fmt::format("{}", value),
         "a multiple of 16 (rows stay 64-byte aligned, so that row chunks give the same bits)");
  }
  void number(const char* field, double value, bool ok, const char* allowed) const {
    if (std::isfinite(value) && ok) return;
    fail(field, fmt::format("{}", value), allowed);
  }
  [[noreturn]] void fail(const char* field, std::string found, std::string allowed) const {
    throw InvalidInput(where_, field, std::move(found), std::move(allowed));
  }

 private:
  const std::string& where_;
  bool trained_;
};

void validate_dimensions(const ModelSpec& spec, const Checker& check) {
  check.range("layers", spec.layers, 1, kMaxLayers);
  check.width("hidden", spec.hidden);
  check.range("kv_heads", spec.kv_heads, 1, kMaxWidth);
  check.range("heads", spec.heads, 1, kMaxWidth);
  if (spec.heads % spec.kv_heads != 0) {
    check.fail("heads", fmt::format("{}", spec.heads),
               fmt::format("a multiple of kv_heads = {}", spec.kv_heads));
  }
  check.width("head_dim", spec.head_dim);
  check.range("heads * head_dim", spec.heads * spec.head_dim, 1, kMaxWidth);
  check.range("vocab", spec.vocab, 2, kMaxVocab);
  if (!spec.has_moe()) return;
  check.range("experts", spec.experts, 1, kMaxExperts);
  if (spec.top_k < 1 || spec.top_k > spec.experts) {
    check.fail("top_k", fmt::format("{}", spec.top_k),
               fmt::format("an integer from 1 to experts = {}", spec.experts));
  }
  check.width("expert_ffn", spec.expert_ffn);
  if (spec.shared_ffn != 0) check.width("shared_ffn", spec.shared_ffn);
}

/// All or none, but for q_lora_rank; the widths that attention derives from them have to agree with
/// the common fields.
void validate_mla(const ModelSpec& spec, const Checker& check) {
  const std::array<std::pair<const char*, int64_t>, 4> fields = {
      {{"kv_lora_rank", spec.kv_lora_rank},
       {"qk_nope_head_dim", spec.qk_nope_head_dim},
       {"qk_rope_head_dim", spec.qk_rope_head_dim},
       {"v_head_dim", spec.v_head_dim}}};
  const auto set = std::count_if(fields.begin(), fields.end(),
                                 [](const auto& field) { return field.second != 0; });
  if (set == 0) {
    check.range("q_lora_rank (without kv_lora_rank)", spec.q_lora_rank, 0, 0);
    return;
  }
  if (spec.q_lora_rank != 0) check.width("q_lora_rank", spec.q_lora_rank);
  for (const auto& [name, value] : fields) {
    if (value == 0) {
      check.fail(name, "0", "above 0, since other fields of latent attention (MLA) are set");
    }
    check.width(name, value);
  }
  if (spec.kv_heads != spec.heads) {
    check.fail("kv_heads", fmt::format("{}", spec.kv_heads),
               fmt::format("heads = {}, since kv_lora_rank is set", spec.heads));
  }
  const int64_t head_dim = spec.qk_nope_head_dim + spec.qk_rope_head_dim;
  if (spec.head_dim != head_dim) {
    check.fail("head_dim", fmt::format("{}", spec.head_dim),
               fmt::format("qk_nope_head_dim + qk_rope_head_dim = {}", head_dim));
  }
  if (spec.qk_norm) check.fail("qk_norm", "true", "false, since kv_lora_rank is set");
  check.range("heads * (qk_nope_head_dim + v_head_dim)", spec.kv_up_width(), 1, kMaxWidth);
}

void validate_layers(const ModelSpec& spec, const Checker& check) {
  if (static_cast<int64_t>(spec.moe_layer.size()) != spec.layers) {
    check.fail("moe_layer", fmt::format("{} entries", spec.moe_layer.size()),
               fmt::format("one per layer, {}", spec.layers));
  }
  if (spec.has_moe() && spec.moe_layers() == 0) {
    check.fail("dense_layers", "every layer", "at least one layer with experts");
  }
  if (!spec.has_moe()) {
    check.range("moe_layer (without experts)", spec.moe_layers(), 0, 0);
    check.range("expert_ffn (without experts)", spec.expert_ffn, 0, 0);
    check.range("shared_ffn (without experts)", spec.shared_ffn, 0, 0);
    check.range("top_k (without experts)", spec.top_k, 0, 0);
  }
  const bool has_dense = spec.moe_layers() < spec.layers;
  if (has_dense) check.width("dense_ffn", spec.dense_ffn);
  if (!has_dense && spec.dense_ffn != 0) {
    check.fail("dense_ffn", fmt::format("{}", spec.dense_ffn), "0, since no layer is dense");
  }
}

void validate_variants(const ModelSpec& spec, const Checker& check) {
  check.range("mtp_layers", spec.mtp_layers, 0, 16);
  check.range("learned_positions", spec.learned_positions, 0, kMaxVocab);
  check.range("attention_window", spec.attention_window, 0, INT32_MAX);
  const size_t windowed = spec.attention_window > 0 ? static_cast<size_t>(spec.layers) : 0;
  if (spec.windowed_layer.size() != windowed) {
    check.fail("windowed_layer", fmt::format("{} entries", spec.windowed_layer.size()),
               fmt::format("{}, as attention_window is {}", windowed, spec.attention_window));
  }
  if (!spec.qk_norm && (spec.qk_norm_full_width || spec.qk_norm_weightless)) {
    check.fail("qk_norm", "false", "true, since another field says of which kind it is");
  }
  if (spec.shared_gate && spec.shared_ffn == 0) {
    check.fail("shared_gate", "true", "false, since there is no shared expert");
  }
}

void validate_numbers(const ModelSpec& spec, const Checker& check) {
  check.number("rms_eps", spec.rms_eps, spec.rms_eps > 0 && spec.rms_eps < 1,
               "a number between 0 and 1");
  check.number("rope_theta", spec.rope_theta, spec.rope_theta > 1, "a number above 1");
  check.number("dropout", spec.dropout, spec.dropout >= 0 && spec.dropout < 1,
               "a number from 0 to below 1");
  check.number("aux_loss_coef", spec.aux_loss_coef, spec.aux_loss_coef >= 0, "a number, 0 or more");
  check.number("z_loss_coef", spec.z_loss_coef, spec.z_loss_coef >= 0, "a number, 0 or more");
  check.number("router_bias_rate", spec.router_bias_rate, spec.router_bias_rate >= 0,
               "a number, 0 or more");
}

/// A spec that says it is of a family has to be one that family can express.
void validate_family(const ModelSpec& spec, const Checker& check) {
  if (spec.family == "native") return;
  const bool mixtral = spec.family == "mixtral";
  const bool mla = spec.family.starts_with("deepseek_v") || spec.family == "kimi_k2";
  const std::vector<std::string>& families = model_families();
  if (std::find(families.begin(), families.end(), spec.family) == families.end()) {
    check.fail("family", spec.family, fmt::format("{}", fmt::join(families, ", ")));
  }
  if (!mla && !mixtral && spec.family != "qwen3_moe") return;
  const auto needs = [&](bool ok, const char* field, std::string found, const char* allowed) {
    if (!ok) check.fail(field, std::move(found), fmt::format("{} ({})", allowed, spec.family));
  };
  needs(spec.has_mla() == mla, "kv_lora_rank", fmt::format("{}", spec.kv_lora_rank),
        mla ? "above 0" : "0");
  if (mla) return;
  needs(spec.shared_ffn == 0, "shared_ffn", fmt::format("{}", spec.shared_ffn), "0");
  needs(spec.qk_norm != mixtral, "qk_norm", spec.qk_norm ? "true" : "false",
        mixtral ? "false" : "true");
  if (!mixtral) return;
  needs(spec.norm_topk_prob, "norm_topk_prob", "false", "true");
  needs(spec.moe_layers() == spec.layers, "dense_layers", "dense layers", "none");
}

double approximate_parameters(const ModelSpec& spec) {
  const auto real = [](int64_t n) { return static_cast<double>(n); };
  const double mla = real(spec.hidden) * real(spec.q_lora_rank + spec.kv_down_width()) +
                     real(spec.q_lora_rank) * real(spec.q_width()) +
                     real(spec.kv_lora_rank) * real(spec.kv_up_width());
  const double qkv = spec.has_mla() ? mla : real(spec.hidden) * real(spec.qkv_width());
  const double attention = qkv + real(spec.hidden) * real(spec.attn_out_width());
  const double dense = 3.0 * real(spec.hidden) * real(std::max(spec.dense_ffn, spec.shared_ffn));
  const double experts = 3.0 * real(spec.experts) * real(spec.expert_ffn) * real(spec.hidden);
  return real(spec.layers) * (attention + dense + experts) +
         2.0 * real(spec.vocab) * real(spec.hidden);
}

}  // namespace

const std::vector<std::string>& model_families() {
  static const std::vector<std::string> families = {
      "native",    "mixtral",  "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2",
      "qwen2_moe", "glm4_moe", "gpt_oss",   "llama4",      "olmoe",       "granitemoe",
      "llama",     "qwen2",    "qwen3",     "mistral",     "megatron"};
  return families;
}

std::string planned_only_feature(const ModelSpec& spec) {
  const std::array<std::pair<bool, const char*>, 16> features = {
      {{spec.has_mla(), "latent attention (MLA)"},
       {!spec.has_moe(), "a model without experts"},
       {!spec.gated_mlp, "MLPs that are not gated"},
       {spec.layer_norm, "LayerNorm"},
       {spec.qkv_bias || spec.attn_out_bias, "biases of attention"},
       {spec.mlp_bias, "biases of MLPs"},
       {spec.router_bias, "a trained bias of the router"},
       {spec.qk_norm_full_width, "a query norm over all heads"},
       {spec.qk_norm_weightless, "a query norm without weights"},
       {spec.attn_sinks, "attention sinks"},
       {spec.shared_gate, "a gate on the shared expert"},
       {spec.mtp_layers > 0, "multi-token prediction"},
       {spec.learned_positions > 0, "learned positions"},
       {spec.attention_window > 0, "windowed attention"},
       {spec.family == "megatron", "a model read from Megatron's arguments"},
       {spec.family != "native" && spec.family != "mixtral" && spec.family != "qwen3_moe",
        "a model of another family than mixtral and qwen3_moe"}}};
  for (const auto& [found, name] : features) {
    if (found) return name;
  }
  return "";
}

int64_t ModelSpec::moe_layers() const {
  return std::count_if(moe_layer.begin(), moe_layer.end(), [](uint8_t moe) { return moe != 0; });
}

void validate(const ModelSpec& spec, const std::string& where) {
  const Checker check(where, /*trained=*/planned_only_feature(spec).empty());
  validate_dimensions(spec, check);
  validate_mla(spec, check);
  validate_layers(spec, check);
  validate_variants(spec, check);
  validate_numbers(spec, check);
  validate_family(spec, check);
  const double parameters = approximate_parameters(spec);
  check.number("parameters", parameters, parameters <= kMaxParameters, "at most 1e15 in all");
}

namespace {

struct FlagField {
  const char* name;
  bool ModelSpec::*field;
};
constexpr std::array<FlagField, 11> kFlagFields = {
    {{"gated_mlp", &ModelSpec::gated_mlp},
     {"layer_norm", &ModelSpec::layer_norm},
     {"tied_embeddings", &ModelSpec::tied_embeddings},
     {"qkv_bias", &ModelSpec::qkv_bias},
     {"attn_out_bias", &ModelSpec::attn_out_bias},
     {"mlp_bias", &ModelSpec::mlp_bias},
     {"router_bias", &ModelSpec::router_bias},
     {"qk_norm_full_width", &ModelSpec::qk_norm_full_width},
     {"qk_norm_weightless", &ModelSpec::qk_norm_weightless},
     {"attn_sinks", &ModelSpec::attn_sinks},
     {"shared_gate", &ModelSpec::shared_gate}}};

/// Layers marked in `flags`, by number.
std::vector<int64_t> marked(const std::vector<uint8_t>& flags) {
  std::vector<int64_t> numbers;
  for (size_t layer = 0; layer < flags.size(); ++layer) {
    if (flags[layer] != 0) numbers.push_back(static_cast<int64_t>(layer));
  }
  return numbers;
}

void read_variants(JsonReader& reader, ModelSpec* spec) {
  for (const FlagField& flag : kFlagFields) {
    spec->*flag.field = reader.boolean_or(flag.name, spec->*flag.field);
  }
  spec->mtp_layers = reader.int64_or("mtp_layers", 0, 0, 16);
  spec->learned_positions = reader.int64_or("learned_positions", 0, 0, kMaxVocab);
  spec->attention_window = reader.int64_or("attention_window", 0, 0, INT32_MAX);
  const std::vector<int64_t> windowed =
      reader.int64_list_or("windowed_layers", {}, 0, spec->layers - 1);
  if (spec->attention_window > 0) spec->windowed_layer.assign(spec->moe_layer.size(), 0);
  for (const int64_t layer : windowed) {
    if (spec->attention_window == 0) {
      throw InvalidInput(reader.where(), "windowed_layers", fmt::format("{}", layer),
                         "none, since attention_window is 0");
    }
    spec->windowed_layer[static_cast<size_t>(layer)] = 1;
  }
}

void write_variants(const ModelSpec& spec, Json* object) {
  const ModelSpec plain;
  for (const FlagField& flag : kFlagFields) {
    if (spec.*flag.field != plain.*flag.field) (*object)[flag.name] = spec.*flag.field;
  }
  if (spec.mtp_layers > 0) (*object)["mtp_layers"] = spec.mtp_layers;
  if (spec.learned_positions > 0) (*object)["learned_positions"] = spec.learned_positions;
  if (spec.attention_window > 0) {
    (*object)["attention_window"] = spec.attention_window;
    (*object)["windowed_layers"] = marked(spec.windowed_layer);
  }
}

}  // namespace

ModelSpec model_from_json(const Json& object, const std::string& where) {
  JsonReader reader(object, where);
  reader.int64_or("version", kFormatVersion, kFormatVersion, kFormatVersion);

  ModelSpec spec;
  spec.name = reader.string_or("name", "");
  spec.family = reader.string_or("family", spec.family);
  spec.layers = reader.int64("layers", 1, kMaxLayers);
  spec.hidden = reader.int64("hidden", 1, kMaxWidth);
  spec.heads = reader.int64("heads", 1, kMaxWidth);
  spec.kv_heads = reader.int64("kv_heads", 1, kMaxWidth);
  spec.head_dim = reader.int64("head_dim", 1, kMaxWidth);
  spec.vocab = reader.int64("vocab", 2, kMaxVocab);
  spec.experts = reader.int64("experts", 0, kMaxExperts);
  if (spec.has_moe()) {
    spec.top_k = reader.int64("top_k", 1);
    spec.expert_ffn = reader.int64("expert_ffn", 1, kMaxWidth);
  }
  spec.shared_ffn = reader.int64_or("shared_ffn", 0, 0, kMaxWidth);
  spec.dense_ffn = reader.int64_or("dense_ffn", 0, 0, kMaxWidth);
  spec.moe_layer.assign(static_cast<size_t>(spec.layers), spec.has_moe() ? 1 : 0);
  for (const int64_t layer : reader.int64_list_or("dense_layers", {}, 0, spec.layers - 1)) {
    uint8_t& moe = spec.moe_layer[static_cast<size_t>(layer)];
    if (moe == 0) {
      throw InvalidInput(where, "dense_layers", fmt::format("{} twice", layer), "each layer once");
    }
    moe = 0;
  }
  spec.q_lora_rank = reader.int64_or("q_lora_rank", 0, 0, kMaxWidth);
  spec.kv_lora_rank = reader.int64_or("kv_lora_rank", 0, 0, kMaxWidth);
  spec.qk_nope_head_dim = reader.int64_or("qk_nope_head_dim", 0, 0, kMaxWidth);
  spec.qk_rope_head_dim = reader.int64_or("qk_rope_head_dim", 0, 0, kMaxWidth);
  spec.v_head_dim = reader.int64_or("v_head_dim", 0, 0, kMaxWidth);
  spec.qk_norm = reader.boolean_or("qk_norm", spec.qk_norm);
  spec.norm_topk_prob = reader.boolean_or("norm_topk_prob", spec.norm_topk_prob);
  spec.rms_eps = reader.number_or("rms_eps", spec.rms_eps);
  spec.rope_theta = reader.number_or("rope_theta", spec.rope_theta);
  spec.dropout = reader.number_or("dropout", spec.dropout);
  spec.aux_loss_coef = reader.number_or("aux_loss_coef", spec.aux_loss_coef);
  spec.z_loss_coef = reader.number_or("z_loss_coef", spec.z_loss_coef);
  spec.router_bias_rate = reader.number_or("router_bias_rate", spec.router_bias_rate);
  read_variants(reader, &spec);
  reader.finish();
  validate(spec, where);
  return spec;
}

Json to_json(const ModelSpec& spec) {
  Json dense_layers = Json::array();
  for (int64_t layer = 0; layer < spec.layers; ++layer) {
    if (!spec.is_moe(layer)) dense_layers.push_back(layer);
  }
  Json object = {{"version", kFormatVersion},
                 {"name", spec.name},
                 {"family", spec.family},
                 {"layers", spec.layers},
                 {"hidden", spec.hidden},
                 {"heads", spec.heads},
                 {"kv_heads", spec.kv_heads},
                 {"head_dim", spec.head_dim},
                 {"vocab", spec.vocab},
                 {"experts", spec.experts},
                 {"top_k", spec.top_k},
                 {"expert_ffn", spec.expert_ffn},
                 {"shared_ffn", spec.shared_ffn},
                 {"dense_ffn", spec.dense_ffn},
                 {"dense_layers", dense_layers},
                 {"qk_norm", spec.qk_norm},
                 {"norm_topk_prob", spec.norm_topk_prob},
                 {"rms_eps", spec.rms_eps},
                 {"rope_theta", spec.rope_theta},
                 {"dropout", spec.dropout},
                 {"aux_loss_coef", spec.aux_loss_coef},
                 {"z_loss_coef", spec.z_loss_coef},
                 {"router_bias_rate", spec.router_bias_rate}};
  if (!spec.has_moe()) {
    for (const char* key : {"top_k", "expert_ffn", "dense_layers"}) object.erase(key);
  }
  // Files and keys of models without a variant stay as they were.
  write_variants(spec, &object);
  if (!spec.has_mla()) return object;
  object["q_lora_rank"] = spec.q_lora_rank;
  object["kv_lora_rank"] = spec.kv_lora_rank;
  object["qk_nope_head_dim"] = spec.qk_nope_head_dim;
  object["qk_rope_head_dim"] = spec.qk_rope_head_dim;
  object["v_head_dim"] = spec.v_head_dim;
  return object;
}

ModelSpec model_from_file(const std::filesystem::path& path) {
  const Json object = read_json_file(path);
  const std::string where = path.string();
  const bool hugging_face = object.contains("model_type") || object.contains("architectures");
  return hugging_face ? model_from_hf_config(object, where) : model_from_json(object, where);
}

}  // namespace bagualu
