#include "bagualu/model/parameters.h"

#include <fmt/format.h>

#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

// Every function below hands parameters to a visitor as (name inside its module, elements,
// sharding), experts as those of one expert, vocab-parallel ones as columns: the list and the sums
// cannot differ.

template <class Visitor>
void visit_norm(const ModelSpec& spec, std::string_view name, int64_t width, Visitor&& visit) {
  visit(name, ".weight", width, Sharding::kReplicated);
  if (spec.layer_norm) visit(name, ".bias", width, Sharding::kReplicated);
}

/// Weight and bias. A matrix split by columns of its output has its bias split with it; one split
/// by its input adds the bias after the sum, so every rank has it whole.
template <class Visitor>
void visit_linear(std::string_view name, int64_t in, int64_t out, bool bias, Sharding weight,
                  Sharding bias_sharding, Visitor&& visit) {
  visit(name, ".weight", in * out, weight);
  if (bias) visit(name, ".bias", out, bias_sharding);
}

/// The latents' matrices are on every rank whole, since each head reads all of a latent.
template <class Visitor>
void visit_mla(const ModelSpec& spec, Visitor&& visit) {
  const auto split = Sharding::kTensorParallel;
  const auto whole = Sharding::kReplicated;
  const int64_t h = spec.hidden;
  if (spec.q_lora_rank > 0) {
    visit_linear("self_attention.linear_q_down_proj", h, spec.q_lora_rank, spec.qkv_bias, whole,
                 whole, visit);
    visit_norm(spec, "self_attention.q_layernorm", spec.q_lora_rank, visit);
    visit_linear("self_attention.linear_q_up_proj", spec.q_lora_rank, spec.q_width(), false, split,
                 split, visit);
  } else {
    visit_linear("self_attention.linear_q_proj", h, spec.q_width(), false, split, split, visit);
  }
  visit_linear("self_attention.linear_kv_down_proj", h, spec.kv_down_width(), spec.qkv_bias, whole,
               whole, visit);
  visit_norm(spec, "self_attention.kv_layernorm", spec.kv_lora_rank, visit);
  visit_linear("self_attention.linear_kv_up_proj", spec.kv_lora_rank, spec.kv_up_width(), false,
               split, split, visit);
}

template <class Visitor>
void visit_attention(const ModelSpec& spec, Visitor&& visit) {
  visit_norm(spec, "input_layernorm", spec.hidden, visit);
  if (spec.has_mla()) {
    visit_mla(spec, visit);
  } else {
    visit_linear("self_attention.linear_qkv", spec.hidden, spec.qkv_width(), spec.qkv_bias,
                 Sharding::kTensorParallel, Sharding::kTensorParallel, visit);
  }
  if (spec.qk_norm && !spec.qk_norm_weightless) {
    const bool full = spec.qk_norm_full_width;
    visit_norm(spec, "self_attention.q_layernorm", full ? spec.q_width() : spec.head_dim, visit);
    visit_norm(spec, "self_attention.k_layernorm", full ? spec.kv_width() : spec.head_dim, visit);
  }
  if (spec.attn_sinks) {
    visit("self_attention.core_attention", ".softmax_offset", spec.heads,
          Sharding::kTensorParallel);
  }
  visit_linear("self_attention.linear_proj", spec.attn_out_width(), spec.hidden, spec.attn_out_bias,
               Sharding::kTensorParallel, Sharding::kReplicated, visit);
}

template <class Visitor>
void visit_mlp(const ModelSpec& spec, std::string_view fc1, std::string_view fc2, int64_t ffn,
               Sharding split, Sharding whole, Visitor&& visit) {
  visit_linear(fc1, spec.hidden, spec.fc1_factor() * ffn, spec.mlp_bias, split, split, visit);
  visit_linear(fc2, ffn, spec.hidden, spec.mlp_bias, split, whole, visit);
}

template <class Visitor>
void visit_layer(const ModelSpec& spec, bool moe, Visitor&& visit) {
  visit_attention(spec, visit);
  visit_norm(spec, "pre_mlp_layernorm", spec.hidden, visit);
  if (!moe) {
    visit_mlp(spec, "mlp.linear_fc1", "mlp.linear_fc2", spec.dense_ffn, Sharding::kTensorParallel,
              Sharding::kReplicated, visit);
    return;
  }
  visit_linear("mlp.router", spec.hidden, spec.experts, spec.router_bias, Sharding::kReplicated,
               Sharding::kReplicated, visit);
  visit_mlp(spec, "mlp.experts.linear_fc1", "mlp.experts.linear_fc2", spec.expert_ffn,
            Sharding::kExpertSplit, Sharding::kExpertWhole, visit);
  if (spec.shared_ffn > 0) {
    visit_mlp(spec, "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2",
              spec.shared_ffn, Sharding::kTensorParallel, Sharding::kReplicated, visit);
  }
  if (spec.shared_gate) {
    visit("mlp.shared_experts", ".gate_weight", spec.hidden, Sharding::kReplicated);
  }
}

/// Megatron builds the MTP layers from the spec of the last layer.
bool mtp_is_moe(const ModelSpec& spec) { return spec.is_moe(spec.layers - 1); }

/// Two norms and one matrix join the embedding of the next token to the hidden state.
template <class Visitor>
void visit_mtp_joint(const ModelSpec& spec, Visitor&& visit) {
  visit_norm(spec, "enorm", spec.hidden, visit);
  visit_norm(spec, "hnorm", spec.hidden, visit);
  visit("eh_proj", ".weight", 2 * spec.hidden * spec.hidden, Sharding::kTensorParallel);
}

template <class Visitor>
void visit_embedding(const ModelSpec& spec, Visitor&& visit) {
  visit("embedding.word_embeddings", ".weight", spec.hidden, Sharding::kVocabParallel);
  if (spec.learned_positions > 0) {
    visit("embedding.position_embeddings", ".weight", spec.learned_positions * spec.hidden,
          Sharding::kReplicated);
  }
}

/// Visitor that adds up.
struct Summing {
  ParameterSums* sums;

  void operator()(std::string_view, std::string_view, int64_t elements, Sharding sharding) const {
    switch (sharding) {
      case Sharding::kReplicated:
        sums->replicated += elements;
        return;
      case Sharding::kTensorParallel:
        sums->tensor_parallel += elements;
        return;
      case Sharding::kVocabParallel:
        sums->vocab_columns += elements;
        return;
      case Sharding::kExpertSplit:
        sums->expert_split += elements;
        return;
      case Sharding::kExpertWhole:
        sums->expert_whole += elements;
        return;
    }
  }
};

/// Visitor that writes rows.
struct Listing {
  const ModelSpec& spec;
  std::vector<PlannedParameter>* rows;
  std::string prefix;
  PlannedParameter::Place place;
  int64_t layer = -1;

  void operator()(std::string_view module, std::string_view kind, int64_t elements,
                  Sharding sharding) const {
    const bool expert = sharding == Sharding::kExpertSplit || sharding == Sharding::kExpertWhole;
    const int64_t copies =
        expert ? spec.experts : (sharding == Sharding::kVocabParallel ? spec.vocab : 1);
    rows->push_back(
        {fmt::format("{}{}{}", prefix, module, kind), place, layer, elements * copies, sharding});
  }
};

int64_t whole_model(const ParameterSums& sums, const ModelSpec& spec, int64_t experts) {
  return sums.replicated + sums.tensor_parallel + sums.vocab_columns * spec.vocab +
         (sums.expert_split + sums.expert_whole) * experts;
}

int64_t count_parameters(const ModelSpec& spec, int64_t experts) {
  const ModelParameters parts = model_parameters(spec);
  const int64_t moe_layers = spec.moe_layers();
  ParameterSums sums = parts.embedding;
  sums += parts.dense_layer * (spec.layers - moe_layers);
  sums += parts.moe_layer * moe_layers;
  sums += parts.final_norm;
  sums += parts.head;
  return whole_model(sums, spec, experts);
}

}  // namespace

std::string_view sharding_name(Sharding sharding) {
  switch (sharding) {
    case Sharding::kReplicated:
      return "replicated";
    case Sharding::kTensorParallel:
      return "tensor-parallel";
    case Sharding::kVocabParallel:
      return "vocab-parallel";
    case Sharding::kExpertSplit:
      return "expert";
    case Sharding::kExpertWhole:
      return "expert, whole";
  }
  BGL_CHECK(false, static_cast<int>(sharding));
  return {};
}

ParameterSums& ParameterSums::operator+=(const ParameterSums& other) {
  replicated += other.replicated;
  tensor_parallel += other.tensor_parallel;
  vocab_columns += other.vocab_columns;
  expert_split += other.expert_split;
  expert_whole += other.expert_whole;
  return *this;
}

ParameterSums ParameterSums::operator*(int64_t times) const {
  return {replicated * times, tensor_parallel * times, vocab_columns * times, expert_split * times,
          expert_whole * times};
}

ParameterSums layer_parameters(const ModelSpec& spec, bool moe) {
  ParameterSums sums;
  visit_layer(spec, moe, Summing{&sums});
  return sums;
}

ModelParameters model_parameters(const ModelSpec& spec) {
  ModelParameters parts;
  visit_embedding(spec, Summing{&parts.embedding});
  if (spec.dense_ffn > 0) parts.dense_layer = layer_parameters(spec, false);
  if (spec.has_moe()) parts.moe_layer = layer_parameters(spec, true);
  visit_norm(spec, "", spec.hidden, Summing{&parts.final_norm});
  if (!spec.tied_embeddings) parts.head.vocab_columns = spec.hidden;
  // Copies: the MTP layers look tokens up, positions included; a tied head needs the matrix alone.
  if (spec.mtp_layers > 0) {
    visit_mtp_joint(spec, Summing{&parts.mtp_layer});
    parts.mtp_layer += parts.layer(mtp_is_moe(spec));
    parts.mtp_layer += parts.final_norm;
    parts.embedding_copy = parts.embedding;
  } else if (spec.tied_embeddings) {
    parts.embedding_copy.vocab_columns = spec.hidden;
  }
  return parts;
}

ParameterSums stage_parameters(const ModelSpec& spec, const ModelParameters& parameters,
                               const StageContent& stage, bool has_embedding) {
  int64_t moe = 0;
  for (int64_t i = 0; i < stage.layer_count; ++i) moe += spec.is_moe(stage.first_layer + i) ? 1 : 0;
  ParameterSums sums = parameters.moe_layer * moe;
  sums += parameters.dense_layer * (stage.layer_count - moe);
  sums += parameters.mtp_layer * stage.mtp_layers;
  if (stage.embedding) sums += parameters.embedding;
  if (stage.head) {
    sums += parameters.final_norm;
    sums += parameters.head;
  }
  const bool reads_embedding = stage.mtp_layers > 0 || (stage.head && spec.tied_embeddings);
  if (reads_embedding && !stage.embedding && !has_embedding) sums += parameters.embedding_copy;
  return sums;
}

RankElements rank_elements(const ParameterSums& sums, const ModelSpec& spec,
                           const JobLayout& layout, int64_t padded_vocab) {
  RankElements rank;
  rank.dense = sums.replicated + sums.tensor_parallel / layout.tp +
               sums.vocab_columns * (padded_vocab / layout.tp);
  rank.expert = (sums.expert_split / layout.etp + sums.expert_whole) * (spec.experts / layout.ep);
  return rank;
}

std::vector<PlannedParameter> planned_parameters(const ModelSpec& spec) {
  using Place = PlannedParameter::Place;
  std::vector<PlannedParameter> rows;
  visit_embedding(spec, Listing{spec, &rows, "", Place::kEmbedding});
  for (int64_t layer = 0; layer < spec.layers; ++layer) {
    visit_layer(
        spec, spec.is_moe(layer),
        Listing{spec, &rows, fmt::format("decoder.layers.{}.", layer), Place::kLayer, layer});
  }
  visit_norm(spec, "final_layernorm", spec.hidden,
             Listing{spec, &rows, "decoder.", Place::kFinalNorm});
  if (!spec.tied_embeddings) {
    Listing{spec, &rows, "", Place::kHead}("output_layer", ".weight", spec.hidden,
                                           Sharding::kVocabParallel);
  }
  for (int64_t layer = 0; layer < spec.mtp_layers; ++layer) {
    Listing list{spec, &rows, fmt::format("mtp.layers.{}.", layer), Place::kMtp, layer};
    visit_mtp_joint(spec, list);
    visit_norm(spec, "final_layernorm", spec.hidden, list);
    list.prefix += "transformer_layer.";
    visit_layer(spec, mtp_is_moe(spec), list);
  }
  return rows;
}

int64_t total_parameters(const ModelSpec& spec) { return count_parameters(spec, spec.experts); }

int64_t active_parameters(const ModelSpec& spec) { return count_parameters(spec, spec.top_k); }

int64_t mtp_parameters(const ModelSpec& spec) {
  return whole_model(model_parameters(spec).mtp_layer, spec, spec.experts) * spec.mtp_layers;
}

}  // namespace bagualu
