#pragma once

/// Glossary of this room (shapes only: nothing here knows time or policy):
///   hidden       width of the residual stream, h
///   dense layer  a layer whose MLP is one gated MLP of width dense_ffn
///   MoE layer    a layer with a router, `experts` gated MLPs of width expert_ffn of which each
///   token
///                uses top_k, and, if shared_ffn > 0, one gated MLP that every token uses
///   dense group  parameters every rank holds; expert group: parameters split over expert-parallel
///   ranks
/// Invariants: a ModelSpec that came from a reader below, or passed validate(), is safe to size:
/// no product of its dimensions overflows int64.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "bagualu/base/json.h"

namespace bagualu {

/// A decoder-only transformer. By default with grouped-query attention, RMSNorm, RoPE and gated
/// (SiLU) MLPs, which is what the runtime trains; the variants further down are for planning.
struct ModelSpec {
  std::string name;  ///< for people; not interpreted
  /// "native", "mixtral", "qwen3_moe": what it can be exported as; every other family of
  /// model_families() is planned, not trained or exported.
  std::string family = "native";
  int64_t layers = 0;
  int64_t hidden = 0;  ///< multiple of 16
  int64_t heads = 0;   ///< query heads; multiple of kv_heads
  int64_t kv_heads = 0;
  int64_t head_dim = 0;  ///< of queries and keys; multiple of 16
  int64_t vocab = 0;
  int64_t dense_ffn = 0;           ///< multiple of 16; 0 if no layer is dense
  int64_t experts = 0;             ///< 0: every layer is dense (planning only)
  int64_t top_k = 0;               ///< at most experts
  int64_t expert_ffn = 0;          ///< multiple of 16
  int64_t shared_ffn = 0;          ///< multiple of 16; 0 if there is no shared expert
  std::vector<uint8_t> moe_layer;  ///< one per layer, 1 = MoE
  bool qk_norm = false;            ///< RMSNorm over head_dim on queries and keys, before RoPE
  bool norm_topk_prob = true;      ///< the top-k probabilities of a token are scaled to sum 1
  // Multi-head latent attention (MLA): queries, and keys with values, go through a narrow latent
  // with an RMSNorm of its own; a key is a part without RoPE beside one rotated part that all heads
  // share. kv_lora_rank 0 = no MLA. With MLA: kv_heads = heads, head_dim = qk_nope + qk_rope.
  int64_t q_lora_rank = 0;       ///< width of the queries' latent; multiple of 16; 0 with MLA: none
  int64_t kv_lora_rank = 0;      ///< width of the keys' and values' latent; multiple of 16
  int64_t qk_nope_head_dim = 0;  ///< part of head_dim without RoPE; multiple of 16
  int64_t qk_rope_head_dim = 0;  ///< part of head_dim with RoPE; multiple of 16
  int64_t v_head_dim = 0;        ///< multiple of 16
  // Variants of planned models; the runtime trains tied embeddings alone (planned_only_feature()).
  bool gated_mlp = true;         ///< false: fc1 makes one ffn width (GELU, squared ReLU), not two
  bool layer_norm = false;       ///< LayerNorm with a bias in place of RMSNorm
  bool tied_embeddings = false;  ///< the head multiplies by the embedding's matrix
  bool qkv_bias = false;
  bool attn_out_bias = false;
  bool mlp_bias = false;            ///< of dense, shared and expert MLPs
  bool router_bias = false;         ///< a trained bias on the router's scores
  bool qk_norm_full_width = false;  ///< with qk_norm: one norm over all heads together
  bool qk_norm_weightless = false;  ///< with qk_norm: the norm has no parameters
  bool attn_sinks = false;          ///< one trained scalar per query head beside the scores
  bool shared_gate = false;         ///< a trained scalar gate per token on the shared expert
  int64_t mtp_layers = 0;           ///< multi-token prediction layers behind the last layer
  int64_t learned_positions = 0;    ///< rows of a learned position embedding; 0: none
  /// Tokens a windowed layer attends to; 0: every layer attends to all. Changes time, not bytes.
  int64_t attention_window = 0;
  std::vector<uint8_t> windowed_layer;  ///< one per layer if attention_window > 0, else empty
  double rms_eps = 1e-6;
  double rope_theta = 10000.0;
  double dropout = 0.0;        ///< hidden-state dropout after attn_proj and after the MLP, [0, 1)
  double aux_loss_coef = 0.0;  ///< balancing loss, applied per layer; 0 = off
  double z_loss_coef = 0.0;    ///< router z-loss, per layer; 0 = off
  double router_bias_rate = 0.0;  ///< loss-free balancing: bias change per step; 0 = off

  bool operator==(const ModelSpec&) const = default;

  bool is_moe(int64_t layer) const { return moe_layer[static_cast<size_t>(layer)] != 0; }
  int64_t moe_layers() const;
  bool has_mla() const { return kv_lora_rank > 0; }
  bool has_moe() const { return experts > 0; }
  /// Columns of fc1 over the columns of its activation: 2 if gated.
  int64_t fc1_factor() const { return gated_mlp ? 2 : 1; }
  int64_t rope_dim() const { return has_mla() ? qk_rope_head_dim : head_dim; }
  int64_t attn_out_width() const { return heads * (has_mla() ? v_head_dim : head_dim); }
  int64_t kv_down_width() const { return kv_lora_rank + qk_rope_head_dim; }        ///< MLA
  int64_t kv_up_width() const { return heads * (qk_nope_head_dim + v_head_dim); }  ///< MLA
  int64_t q_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
};

/// Names a reader may give ModelSpec::family.
const std::vector<std::string>& model_families();

/// What of this spec the runtime cannot train, as "latent attention (MLA)"; empty if it can.
std::string planned_only_feature(const ModelSpec& spec);

/// Throws InvalidInput(where) if a field is out of range or fields contradict each other.
void validate(const ModelSpec& spec, const std::string& where);

/// Native schema (docs/formats.md): keys as the fields of ModelSpec, with `dense_layers` (a list of
/// layer numbers) in place of moe_layer, and `version` (1, optional). Unknown keys are errors.
ModelSpec model_from_json(const Json& object, const std::string& where);
Json to_json(const ModelSpec& spec);

/// As read_hf_config() in hf_config.h, and a file of model_type mixtral or qwen3_moe, which the
/// runtime trains, is refused if a key of it would change the mathematics of training and is not
/// implemented (biases, dropout of attention, windows, scaled RoPE).
/// The router's loss coefficient counts only with `output_router_logits: true`, as in transformers.
ModelSpec model_from_hf_config(const Json& object, const std::string& where);

/// The config.json that transformers needs to load this model's weights. A native model is written
/// as qwen3_moe if it has qk_norm or dense layers, else as mixtral. Throws:  InvalidInput if
/// neither family can express the model (a shared expert or MLA, for instance).
Json to_hf_config(const ModelSpec& spec, int64_t max_positions);

/// Reads a native or a Hugging Face file; "model_type" in it makes the difference. For planning,
/// read_model_file() in hf_config.h takes more.
ModelSpec model_from_file(const std::filesystem::path& path);

}  // namespace bagualu
