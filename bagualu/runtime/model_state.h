#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/model/layout.h"
#include "bagualu/model/model_spec.h"
#include "bagualu/model/parameter_layout.h"

namespace bagualu {

/// The weights one layer computes with: views into the flat buffers, in the compute dtype.
/// Gradients are fp32 views of the flat gradient buffers, always added to.
struct WeightAndGrad {
  at::Tensor weight;
  at::Tensor grad;
};

struct LayerWeights {
  WeightAndGrad attn_norm, qkv, q_norm, k_norm, attn_proj, mlp_norm;
  WeightAndGrad router, expert_fc1, expert_fc2;
  WeightAndGrad shared_fc1, shared_fc2, mlp_fc1, mlp_fc2;
  at::Tensor router_bias;  ///< fp32 [E], selection only; undefined for dense layers
};

/// Parameters, gradients and optimizer moments of the virtual stages of one rank, in flat buffers
/// (one per group), and the views the operators use. Layers and names are numbered as in the model.
/// With tied embeddings the head's matrix is the embedding's: one tensor where the rank holds both,
/// a copy named "embed_tokens" too where it holds the head alone.
/// Invariants: with fp32 compute the weights are the master parameters; with bf16 they are working
///             copies that refresh_working_copies() makes anew.
/// Owns: every tensor that lives as long as the trainer, except rope tables and batches.
class ModelState {
 public:
  ModelState(const ModelSpec& spec, const ParallelLayout& layout, Dtype dtype, int64_t pp_rank = 0);

  /// Normal(0, 0.02) weights, ones for norms, from one generator per parameter whose seed depends
  /// only on (seed, name, first global expert), so that every layout starts from the same model.
  void init_parameters(uint64_t seed, int64_t ep_rank);
  void refresh_working_copies();
  void zero_gradients();

  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
  NamedTensors parameters() const;       ///< fp32 masters
  NamedTensors gradients() const;        ///< fp32
  NamedTensors optimizer_state() const;  ///< "exp_avg.<parameter>", "exp_avg_sq.<parameter>"
  NamedTensors buffers() const;          ///< "layers.{i}.router_bias"

  bool holds_layer(int64_t i) const { return layers_[i].attn_norm.weight.defined(); }
  /// Requires: the rank holds layer i of the model.
  const LayerWeights& layer(int64_t i) const {
    BGL_CHECK(holds_layer(i), i);
    return layers_[i];
  }
  LayerWeights& layer(int64_t i) {
    BGL_CHECK(holds_layer(i), i);
    return layers_[i];
  }
  /// Undefined where the rank does not hold them.
  const WeightAndGrad& embedding() const { return embedding_; }
  const WeightAndGrad& final_norm() const { return final_norm_; }
  const WeightAndGrad& lm_head() const { return lm_head_; }

  const ParameterLayout& parameter_layout() const { return parameter_layout_; }

  /// Part of the dense gradients that this rank counts in the norm: all but a tied copy's.
  at::Tensor counted_dense_gradient() const;
  /// Gradient of the embedding's matrix where another pipeline rank holds a copy of it, to be
  /// summed over the two after the data-parallel sum (shares_embedding()); else undefined.
  at::Tensor tied_gradient() const;

  /// Flat buffers of one group, all the same length.
  struct Group {
    at::Tensor master, grad, exp_avg, exp_avg_sq, working;
  };
  Group& group(ParameterGroup which) { return which == ParameterGroup::kDense ? dense_ : expert_; }

 private:
  Group make_group(int64_t elements) const;
  const Group& group_of(const Parameter& parameter) const;
  at::Tensor view(const at::Tensor& flat, const Parameter& parameter) const;
  WeightAndGrad bind(const std::string& name) const;
  void bind_ends(const ModelSpec& spec);
  void bind_layer(const ModelSpec& spec, int64_t i);
  NamedTensors named(at::Tensor Group::*member, const std::string& prefix) const;

  Dtype dtype_;
  int64_t experts_local_;
  bool shares_embedding_;
  ParameterLayout parameter_layout_;
  Group dense_, expert_;
  std::vector<LayerWeights> layers_;
  WeightAndGrad embedding_, final_norm_, lm_head_;
};

}  // namespace bagualu
