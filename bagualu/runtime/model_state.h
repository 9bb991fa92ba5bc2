#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "bagualu/model/layout.h"
#include "bagualu/model/model_spec.h"
#include "bagualu/model/parameter_layout.h"

namespace bagualu {

/// The weights one layer computes with: views into the flat buffers, in the compute dtype. Gradients
/// are fp32 views of the flat gradient buffers, always added to.
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

/// Parameters, gradients and optimizer moments of one rank, in flat buffers (one per group), and
/// the views the operators use.
/// Invariants: with fp32 compute the weights are the master parameters; with bf16 they are working
///             copies that refresh_working_copies() makes anew.
/// Owns: every tensor that lives as long as the trainer, except rope tables and batches.
class ModelState {
 public:
  ModelState(const ModelSpec& spec, const ParallelLayout& layout, Dtype dtype);

  /// Normal(0, 0.02) weights, ones for norms, from one generator per parameter whose seed depends
  /// only on (seed, name, first global expert), so that any ep_size starts from the same model.
  void init_parameters(uint64_t seed, int64_t ep_rank);
  void refresh_working_copies();
  void zero_gradients();

  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
  NamedTensors parameters() const;       ///< fp32 masters
  NamedTensors gradients() const;        ///< fp32
  NamedTensors optimizer_state() const;  ///< "exp_avg.<parameter>", "exp_avg_sq.<parameter>"
  NamedTensors buffers() const;          ///< "layers.{i}.router_bias"

  const LayerWeights& layer(int64_t i) const { return layers_[i]; }
  LayerWeights& layer(int64_t i) { return layers_[i]; }
  const WeightAndGrad& embedding() const { return embedding_; }
  const WeightAndGrad& final_norm() const { return final_norm_; }
  const WeightAndGrad& lm_head() const { return lm_head_; }

  const ParameterLayout& parameter_layout() const { return parameter_layout_; }

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
  void bind_layers(const ModelSpec& spec);
  NamedTensors named(at::Tensor Group::*member, const std::string& prefix) const;

  Dtype dtype_;
  int64_t experts_local_;
  ParameterLayout parameter_layout_;
  Group dense_, expert_;
  std::vector<LayerWeights> layers_;
  WeightAndGrad embedding_, final_norm_, lm_head_;
};

}  // namespace bagualu
