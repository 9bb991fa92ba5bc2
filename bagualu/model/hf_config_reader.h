#pragma once

// Shared by the readers of the families, hf_config*.cpp; others include hf_config.h.

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/model/model_spec.h"

namespace bagualu {

/// What a model is read for. kTrain refuses what would change the mathematics of training and is
/// not implemented, kPlan takes what changes bytes or time and lists the rest as ignored.
enum class ModelUse { kTrain, kPlan };

// Note [Defaults of a config.json]
// transformers leaves a key out of old files when it equals the default of its class, so an absent
// key has a meaning per family. Sizes are the exception: a file without them is cut or foreign.
struct HfDefaults {
  double rope_theta = 1e4;
  double rms_eps = 1e-6;
  int64_t head_dim = 0;  ///< of an absent key; 0: hidden_size / num_attention_heads
};

/// One object of a config.json. Every key is read, ignored, or an error at the end.
class HfReader {
 public:
  /// `prefix` stands before the names of ignored keys.
  HfReader(const Json& object, std::string where, ModelUse use, std::string prefix = "");

  JsonReader& json() { return json_; }
  ModelUse use() const { return use_; }
  /// Present, if only as null: for some keys null says "none" and absence the default.
  bool contains(const char* key) const { return object_.contains(key); }

  /// These keys have no effect here, whatever they hold.
  void ignore(std::initializer_list<const char*> keys);
  /// The same for every family: token ids, names, storage and generation settings.
  void ignore_common();
  /// The first of the names that is there; two that are there must agree. 0 if none is.
  int64_t alias(std::initializer_list<const char*> names, int64_t min, int64_t max);
  /// Throws unless ok; for a key that holds a value nobody knows, or contradicts another.
  void expect(bool ok, const std::string& key, const std::string& allowed);
  /// Throws unless the text is one of those; absent is fine.
  void expect_one_of(const char* key, std::initializer_list<std::string_view> allowed);
  /// Unknown keys are errors; what was ignored, in the file's order.
  std::vector<std::string> finish();

 private:
  const Json& object_;
  JsonReader json_;
  ModelUse use_;
  std::string prefix_;
  std::vector<std::string> ignored_;
};

/// Layers, widths, heads, vocabulary, norms, RoPE, tied embeddings; every layer is dense. With
/// kTrain, values that would change the mathematics are refused.
void read_shape(HfReader& reader, const HfDefaults& defaults, ModelSpec* spec);
/// Experts under any of their names, top_k, the balancing loss; every layer has experts.
void read_experts(HfReader& reader, ModelSpec* spec);
/// `window` tokens in the layers that `layer_types` marks, or in all of them without that key and
/// with `windowed` empty, or in those of `windowed`. A window that never cuts is none.
void set_window(HfReader& reader, int64_t window, std::vector<uint8_t> windowed, ModelSpec* spec);
/// Turns a model whose every layer is dense into one without experts.
void drop_unused_experts(ModelSpec* spec);
/// RoPE's base, from `rope_parameters` (transformers 5) or the top level (older files). Scaling of
/// it changes no bytes and no time.
double read_rope(HfReader& reader, double fallback);

// The readers of the families, by file.
void read_llama(HfReader& reader, ModelSpec* spec);       // hf_config_dense.cpp
void read_qwen_dense(HfReader& reader, ModelSpec* spec);  // qwen2, qwen3
void read_mistral(HfReader& reader, ModelSpec* spec);
void read_mixtral(HfReader& reader, ModelSpec* spec);   // hf_config_moe.cpp
void read_qwen_moe(HfReader& reader, ModelSpec* spec);  // qwen2_moe, qwen3_moe
void read_olmoe(HfReader& reader, ModelSpec* spec);
void read_granitemoe(HfReader& reader, ModelSpec* spec);
void read_gpt_oss(HfReader& reader, ModelSpec* spec);
void read_llama4(HfReader& reader, ModelSpec* spec);
void read_deepseek(HfReader& reader, ModelSpec* spec);  // hf_config_deepseek.cpp
void read_glm4_moe(HfReader& reader, ModelSpec* spec);

}  // namespace bagualu
