#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/model/job.h"
#include "bagualu/model/model_spec.h"

namespace bagualu {

/// How Megatron-Core spreads one parameter over the ranks that hold its stage.
enum class Sharding : uint8_t {
  kReplicated,      ///< whole on every rank: norms, router, MLA's down projections, fc2's biases
  kTensorParallel,  ///< 1 / tp
  kVocabParallel,   ///< rows padded (Job::padded_vocab()), then 1 / tp
  kExpertSplit,     ///< experts over ep, each over etp
  kExpertWhole,     ///< experts over ep, each whole on every rank of etp: biases of fc2
};
std::string_view sharding_name(Sharding sharding);

/// Elements by how they are spread; sums of any part of a model.
struct ParameterSums {
  int64_t replicated = 0;
  int64_t tensor_parallel = 0;
  int64_t vocab_columns = 0;  ///< columns of vocab-parallel matrices: elements = vocab * columns
  int64_t expert_split = 0;   ///< of ONE expert
  int64_t expert_whole = 0;   ///< of ONE expert

  ParameterSums& operator+=(const ParameterSums& other);
  ParameterSums operator*(int64_t times) const;
  bool operator==(const ParameterSums&) const = default;
};

/// Sums by kind of layer. Every layer of a kind has the same parameters.
struct ModelParameters {
  ParameterSums embedding;    ///< word embedding, learned positions
  ParameterSums dense_layer;  ///< zeros if there is none
  ParameterSums moe_layer;    ///< zeros if there is none
  ParameterSums mtp_layer;    ///< one multi-token prediction layer; embedding and head are shared
  ParameterSums final_norm;
  /// Output matrix. With tied embeddings it is no parameter of its own: zeros here, and a stage
  /// that has the head but not the embedding holds a copy, `embedding_copy`.
  ParameterSums head;
  /// What a stage holds that reads the embedding without having it: the head if tied, MTP layers.
  ParameterSums embedding_copy;

  const ParameterSums& layer(bool moe) const { return moe ? moe_layer : dense_layer; }
};

/// Requires: spec passed validate(). Cost: below a microsecond, no allocation.
ModelParameters model_parameters(const ModelSpec& spec);
ParameterSums layer_parameters(const ModelSpec& spec, bool moe);

/// Parameters of one virtual stage, of the whole tp, ep and etp groups together. `has_embedding`:
/// the rank holds the embedding already, in this stage or another of its stages, so that no copy is
/// needed.
ParameterSums stage_parameters(const ModelSpec& spec, const ModelParameters& parameters,
                               const StageContent& stage, bool has_embedding);

/// Elements on one rank: `dense` are the same on all data-parallel ranks, `expert` on those that
/// hold the same experts (JobLayout::expert_dp()).
struct RankElements {
  int64_t dense = 0;
  int64_t expert = 0;

  int64_t total() const { return dense + expert; }
  bool operator==(const RankElements&) const = default;
};
/// Requires: tp, ep and etp divide what they split, as in a Job that passed validate().
RankElements rank_elements(const ParameterSums& sums, const ModelSpec& spec,
                           const JobLayout& layout, int64_t padded_vocab);

/// One row of the detailed list.
struct PlannedParameter {
  enum class Place : uint8_t { kEmbedding, kLayer, kFinalNorm, kHead, kMtp };

  std::string name;  ///< Megatron-Core's: "decoder.layers.3.mlp.experts.linear_fc1.weight"
  Place place = Place::kLayer;
  int64_t layer = -1;    ///< of the model, or of the MTP layers; -1 elsewhere
  int64_t elements = 0;  ///< of the whole model: all experts, vocabulary not padded
  Sharding sharding = Sharding::kReplicated;
};

/// Every trained parameter once, in the model's order. Megatron keeps separate tensors per local
/// expert; here an operator's experts are one row. The router's loss-free bias is a buffer, not a
/// parameter, and not listed.
/// Source: Megatron-Core's layer specs with Transformer Engine (gpt_layer_specs.py,
/// multi_latent_attention.py, multi_token_prediction.py). Query and key-value rows are one matrix
/// that is cut evenly into tp parts, also where there are fewer key-value heads than tp ranks.
std::vector<PlannedParameter> planned_parameters(const ModelSpec& spec);

/// Parameters of the whole model without its multi-token prediction layers; those one token uses
/// (top_k experts); those of the MTP layers.
int64_t total_parameters(const ModelSpec& spec);
int64_t active_parameters(const ModelSpec& spec);
int64_t mtp_parameters(const ModelSpec& spec);

}  // namespace bagualu
