#include "bagualu/model/parameter_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"

namespace bagualu {
namespace {

int64_t product(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

/// Appends parameters and gives each its place.
class LayoutBuilder {
 public:
  void weight(std::string name, int64_t layer, std::vector<int64_t> shape,
              ParameterGroup group = ParameterGroup::kDense) {
    add({std::move(name), std::move(shape), group, true, layer, 0, 0, false});
  }
  void norm(std::string name, int64_t layer, int64_t width) {
    add({std::move(name), {width}, ParameterGroup::kDense, false, layer, 0, 0, false});
  }
  void tied_copy(std::string name, std::vector<int64_t> shape) {
    add({std::move(name), std::move(shape), ParameterGroup::kDense, true, -1, 0, 0, true});
  }
  ParameterLayout take() { return std::move(layout_); }

 private:
  void add(Parameter parameter) {
    int64_t& end = parameter.group == ParameterGroup::kDense ? layout_.dense_elements
                                                             : layout_.expert_elements;
    parameter.elements = product(parameter.shape);
    parameter.offset_elements = end;
    end = round_up(end + parameter.elements, kParameterAlignmentElements);
    layout_.parameters.push_back(std::move(parameter));
  }

  ParameterLayout layout_;
};

void add_attention(const ModelSpec& spec, int64_t layer, LayoutBuilder* builder) {
  const std::string prefix = fmt::format("layers.{}.", layer);
  builder->norm(prefix + "attn_norm", layer, spec.hidden);
  if (spec.has_mla()) {
    builder->weight(prefix + "q_down", layer, {spec.q_lora_rank, spec.hidden});
    builder->norm(prefix + "q_norm", layer, spec.q_lora_rank);
    builder->weight(prefix + "q_up", layer, {spec.q_width(), spec.q_lora_rank});
    builder->weight(prefix + "kv_down", layer, {spec.kv_down_width(), spec.hidden});
    builder->norm(prefix + "kv_norm", layer, spec.kv_lora_rank);
    builder->weight(prefix + "kv_up", layer, {spec.kv_up_width(), spec.kv_lora_rank});
  } else {
    builder->weight(prefix + "qkv", layer, {spec.qkv_width(), spec.hidden});
  }
  if (spec.qk_norm) {
    builder->norm(prefix + "q_norm", layer, spec.head_dim);
    builder->norm(prefix + "k_norm", layer, spec.head_dim);
  }
  builder->weight(prefix + "attn_proj", layer, {spec.hidden, spec.attn_out_width()});
}

void add_mlp(const ModelSpec& spec, int64_t layer, int64_t experts_local, LayoutBuilder* builder) {
  const std::string prefix = fmt::format("layers.{}.", layer);
  builder->norm(prefix + "mlp_norm", layer, spec.hidden);
  if (!spec.is_moe(layer)) {
    builder->weight(prefix + "mlp_fc1", layer, {2 * spec.dense_ffn, spec.hidden});
    builder->weight(prefix + "mlp_fc2", layer, {spec.hidden, spec.dense_ffn});
    return;
  }
  builder->weight(prefix + "router", layer, {spec.experts, spec.hidden});
  if (spec.shared_ffn > 0) {
    builder->weight(prefix + "shared_fc1", layer, {2 * spec.shared_ffn, spec.hidden});
    builder->weight(prefix + "shared_fc2", layer, {spec.hidden, spec.shared_ffn});
  }
  builder->weight(prefix + "expert_fc1", layer, {experts_local, 2 * spec.expert_ffn, spec.hidden},
                  ParameterGroup::kExpert);
  builder->weight(prefix + "expert_fc2", layer, {experts_local, spec.hidden, spec.expert_ffn},
                  ParameterGroup::kExpert);
}

}  // namespace

int64_t ParameterLayout::counted_dense_elements() const {
  for (const Parameter& p : parameters) {
    if (p.tied_copy) return p.offset_elements;
  }
  return dense_elements;
}

const Parameter& ParameterLayout::find(std::string_view name) const {
  const auto found = std::find_if(parameters.begin(), parameters.end(),
                                  [&](const Parameter& p) { return p.name == name; });
  BGL_CHECK(found != parameters.end(), name);
  return *found;
}

bool ParameterLayout::holds(std::string_view name) const {
  return std::any_of(parameters.begin(), parameters.end(),
                     [&](const Parameter& p) { return p.name == name; });
}

ParameterLayout parameter_layout(const ModelSpec& spec, int64_t ep_size,
                                 const std::vector<StageSlice>& slices) {
  BGL_CHECK(ep_size > 0 && spec.experts % ep_size == 0, spec.experts, ep_size);
  const std::vector<int64_t> table = {spec.vocab, spec.hidden};
  LayoutBuilder builder;
  bool holds_embedding = false;
  for (const StageSlice& slice : slices) {
    if (slice.embedding) builder.weight("embed_tokens", -1, table);
    holds_embedding = holds_embedding || slice.embedding;
    for (int64_t i = 0; i < slice.layers; ++i) {
      add_attention(spec, slice.first_layer + i, &builder);
      add_mlp(spec, slice.first_layer + i, spec.experts / ep_size, &builder);
    }
    if (!slice.head) continue;
    builder.norm("final_norm", -1, spec.hidden);
    if (!spec.tied_embeddings) {
      builder.weight("lm_head", -1, table);
    } else if (!holds_embedding) {
      builder.tied_copy("embed_tokens", table);
    }
  }
  return builder.take();
}

ParameterLayout parameter_layout(const ModelSpec& spec, int64_t ep_size) {
  return parameter_layout(spec, ep_size, {whole_model(spec)});
}

std::vector<std::string> router_bias_names(const ModelSpec& spec,
                                           const std::vector<StageSlice>& slices) {
  std::vector<std::string> names;
  for (const StageSlice& slice : slices) {
    for (int64_t layer = slice.first_layer; layer < slice.first_layer + slice.layers; ++layer) {
      if (spec.is_moe(layer)) names.push_back(fmt::format("layers.{}.router_bias", layer));
    }
  }
  return names;
}

std::vector<std::string> router_bias_names(const ModelSpec& spec) {
  return router_bias_names(spec, {whole_model(spec)});
}

}  // namespace bagualu
