// Hugging Face config.json (transformers 5.24): which reader reads a file, and files of the
// families that the runtime trains, mixtral and qwen3_moe.

#include "bagualu/model/hf_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/model/hf_config_reader.h"

namespace bagualu {
namespace {

struct Family {
  const char* model_type;
  void (*read)(HfReader&, ModelSpec*);
};
constexpr std::array<Family, 16> kFamilies = {{{"mixtral", read_mixtral},
                                               {"qwen3_moe", read_qwen_moe},
                                               {"qwen2_moe", read_qwen_moe},
                                               {"deepseek_v2", read_deepseek},
                                               {"deepseek_v3", read_deepseek},
                                               {"kimi_k2", read_deepseek},
                                               {"glm4_moe", read_glm4_moe},
                                               {"gpt_oss", read_gpt_oss},
                                               {"llama4", read_llama4},
                                               {"llama4_text", read_llama4},
                                               {"olmoe", read_olmoe},
                                               {"granitemoe", read_granitemoe},
                                               {"llama", read_llama},
                                               {"qwen2", read_qwen_dense},
                                               {"qwen3", read_qwen_dense},
                                               {"mistral", read_mistral}}};

const Family& family_of(const std::string& model_type, const std::string& where) {
  for (const Family& family : kFamilies) {
    if (model_type == family.model_type) return family;
  }
  throw InvalidInput(where, "model_type", model_type,
                     fmt::format("{}", fmt::join(hf_families(), ", ")));
}

ReadModel read_text_model(const Json& object, const std::string& where, ModelUse use,
                          const std::string& prefix) {
  HfReader reader(object, where, use, prefix);
  const Family& family =
      family_of(prefix.empty() ? reader.json().string("model_type")
                               : reader.json().string_or("model_type", "llama4_text"),
                where);
  ReadModel read;
  read.spec.family = family.read == read_llama4 ? "llama4" : family.model_type;
  family.read(reader, &read.spec);
  read.ignored = reader.finish();
  validate(read.spec, where);
  return read;
}

/// A model with pictures: the text model is planned.
ReadModel read_nested_model(const Json& object, const std::string& where, ModelUse use) {
  HfReader outer(object, where, use);
  outer.json().string("model_type");
  outer.ignore_common();
  outer.ignore({"vision_config", "boi_token_index", "eoi_token_index", "image_token_index",
                "boi_token_id", "eoi_token_id", "image_token_id", "_name_or_path"});
  ReadModel read = read_text_model(outer.json().object("text_config"), where + ".text_config", use,
                                   "text_config.");
  const bool tied = outer.json().boolean_or("tie_word_embeddings", read.spec.tied_embeddings);
  outer.expect(tied == read.spec.tied_embeddings, "tie_word_embeddings",
               "what text_config says of it");
  std::vector<std::string> ignored = outer.finish();
  read.ignored.insert(read.ignored.begin(), ignored.begin(), ignored.end());
  return read;
}

ReadModel read_config(const Json& object, const std::string& where, ModelUse use) {
  if (object.contains("text_config")) return read_nested_model(object, where, use);
  return read_text_model(object, where, use, "");
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
          {"tie_word_embeddings", spec.tied_embeddings},
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

const std::vector<std::string>& hf_families() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Family& family : kFamilies) list.emplace_back(family.model_type);
    return list;
  }();
  return names;
}

ReadModel read_hf_config(const Json& object, const std::string& where) {
  return read_config(object, where, ModelUse::kPlan);
}

ReadModel read_model_file(const std::filesystem::path& path) {
  const Json object = read_json_file(path);
  const std::string where = path.string();
  const bool hugging_face = object.contains("model_type") || object.contains("architectures");
  if (hugging_face) return read_hf_config(object, where);
  return {model_from_json(object, where), {}};
}

ModelSpec model_from_hf_config(const Json& object, const std::string& where) {
  const std::string type = JsonReader(object, where).string_or("model_type", "");
  const bool trained = type == "mixtral" || type == "qwen3_moe";
  return read_config(object, where, trained ? ModelUse::kTrain : ModelUse::kPlan).spec;
}

Json to_hf_config(const ModelSpec& spec, int64_t max_positions) {
  ModelSpec exported = spec;
  if (exported.family == "native") {
    const bool mixtral = !spec.qk_norm && spec.norm_topk_prob && spec.moe_layers() == spec.layers;
    exported.family = mixtral ? "mixtral" : "qwen3_moe";
  }
  validate(exported, "export to Hugging Face");
  if (const std::string feature = planned_only_feature(exported); !feature.empty()) {
    throw InvalidInput("export to Hugging Face", "model", feature,
                       "a model that mixtral or qwen3_moe can express");
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
