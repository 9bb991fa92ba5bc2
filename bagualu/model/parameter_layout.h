#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/model/layout.h"
#include "bagualu/model/model_spec.h"

namespace bagualu {

enum class ParameterGroup { kDense, kExpert };

/// Parameters start at a multiple of this many elements in the flat buffer of their group: 64 bytes
/// in fp32, so that no GEMM operand starts inside a cache line.
inline constexpr int64_t kParameterAlignmentElements = 16;

/// One parameter tensor as this rank holds it (experts: the local ones only). Names and layer
/// numbers are the model's, whatever stage holds them.
struct Parameter {
  std::string name;  ///< "layers.3.expert_fc1"; the full list is in docs/formats.md
  std::vector<int64_t> shape;
  ParameterGroup group = ParameterGroup::kDense;
  bool decay = true;            ///< weight decay applies; false for norm weights
  int64_t layer = -1;           ///< -1: embedding, final norm, head
  int64_t offset_elements = 0;  ///< in the flat buffer of its group
  int64_t elements = 0;
  /// With tied embeddings: the copy of "embed_tokens" that the rank of the head keeps where it does
  /// not hold the embedding itself. Both copies take the sum of both gradients; norms and totals
  /// count the first stage's.
  bool tied_copy = false;
};

/// Where every parameter of one rank lies. There is one flat buffer per group for parameters, and
/// with the same offsets one for gradients and one for each optimizer moment. Ensures: order of
/// execution; offsets ascend within a group and do not overlap; the layout is the
///          same on every rank with the same stages.
struct ParameterLayout {
  std::vector<Parameter> parameters;
  int64_t dense_elements = 0;  ///< length of the dense flat buffer, alignment included
  int64_t expert_elements = 0;

  int64_t group_elements(ParameterGroup group) const {
    return group == ParameterGroup::kDense ? dense_elements : expert_elements;
  }
  /// Leading elements of the dense buffer that norms and totals of the model count on this rank:
  /// all but a tied copy, which comes last.
  int64_t counted_dense_elements() const;
  /// Throws:  InternalError if no parameter has this name.
  const Parameter& find(std::string_view name) const;
  bool holds(std::string_view name) const;
};

/// Parameters of the rank that holds `slices`, in the model's order.
/// Requires: spec passed validate(), spec.experts % ep_size == 0, slices in the model's order.
ParameterLayout parameter_layout(const ModelSpec& spec, int64_t ep_size,
                                 const std::vector<StageSlice>& slices);
/// The whole model.
ParameterLayout parameter_layout(const ModelSpec& spec, int64_t ep_size);

/// Names of the non-trained router biases, "layers.{i}.router_bias" [experts] fp32, MoE layers
/// only.
std::vector<std::string> router_bias_names(const ModelSpec& spec,
                                           const std::vector<StageSlice>& slices);
std::vector<std::string> router_bias_names(const ModelSpec& spec);

}  // namespace bagualu
