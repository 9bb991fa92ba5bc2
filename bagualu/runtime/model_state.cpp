#include "bagualu/runtime/model_state.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "bagualu/base/error.h"
#include "bagualu/runtime/ops/optimizer.h"
#include "bagualu/runtime/seeds.h"

namespace bagualu {
namespace {

constexpr double kInitStd = 0.02;

bool is_norm(const Parameter& parameter) { return parameter.shape.size() == 1; }

}  // namespace

ModelState::ModelState(const ModelSpec& spec, const ParallelLayout& layout, Dtype dtype,
                       int64_t pp_rank)
    : dtype_(dtype),
      experts_local_(layout.experts_local(spec)),
      shares_embedding_(shares_embedding(spec, layout, pp_rank)),
      parameter_layout_(
          bagualu::parameter_layout(spec, layout.ep_size, rank_slices(spec, layout, pp_rank))) {
  dense_ = make_group(parameter_layout_.dense_elements);
  expert_ = make_group(parameter_layout_.expert_elements);
  bind_ends(spec);
  layers_.resize(spec.layers);
  for (const StageSlice& slice : rank_slices(spec, layout, pp_rank)) {
    for (int64_t i = 0; i < slice.layers; ++i) bind_layer(spec, slice.first_layer + i);
  }
}

ModelState::Group ModelState::make_group(int64_t elements) const {
  Group group;
  for (at::Tensor* flat : {&group.master, &group.grad, &group.exp_avg, &group.exp_avg_sq}) {
    *flat = at::zeros({elements}, at::kFloat);
  }
  if (dtype_ == Dtype::kBf16) group.working = at::zeros({elements}, at::kBFloat16);
  return group;
}

const ModelState::Group& ModelState::group_of(const Parameter& parameter) const {
  return parameter.group == ParameterGroup::kDense ? dense_ : expert_;
}

at::Tensor ModelState::view(const at::Tensor& flat, const Parameter& parameter) const {
  return flat.narrow(0, parameter.offset_elements, parameter.elements).view(parameter.shape);
}

WeightAndGrad ModelState::bind(const std::string& name) const {
  const Parameter& parameter = parameter_layout_.find(name);
  const Group& group = group_of(parameter);
  const at::Tensor& weights = dtype_ == Dtype::kBf16 ? group.working : group.master;
  return {view(weights, parameter), view(group.grad, parameter)};
}

void ModelState::bind_ends(const ModelSpec& spec) {
  const ParameterLayout& held = parameter_layout_;
  if (held.holds("embed_tokens")) embedding_ = bind("embed_tokens");
  if (!held.holds("final_norm")) return;
  final_norm_ = bind("final_norm");
  lm_head_ = spec.tied_embeddings ? embedding_ : bind("lm_head");
  if (spec.tied_embeddings && held.find("embed_tokens").tied_copy) embedding_ = {};
}

void ModelState::bind_layer(const ModelSpec& spec, int64_t i) {
  const std::string prefix = "layers." + std::to_string(i) + ".";
  LayerWeights& layer = layers_[i];
  layer.attn_norm = bind(prefix + "attn_norm");
  layer.qkv = bind(prefix + "qkv");
  if (spec.qk_norm) {
    layer.q_norm = bind(prefix + "q_norm");
    layer.k_norm = bind(prefix + "k_norm");
  }
  layer.attn_proj = bind(prefix + "attn_proj");
  layer.mlp_norm = bind(prefix + "mlp_norm");
  if (!spec.is_moe(i)) {
    layer.mlp_fc1 = bind(prefix + "mlp_fc1");
    layer.mlp_fc2 = bind(prefix + "mlp_fc2");
    return;
  }
  layer.router = bind(prefix + "router");
  layer.router_bias = at::zeros({spec.experts}, at::kFloat);
  layer.expert_fc1 = bind(prefix + "expert_fc1");
  layer.expert_fc2 = bind(prefix + "expert_fc2");
  if (spec.shared_ffn > 0) {
    layer.shared_fc1 = bind(prefix + "shared_fc1");
    layer.shared_fc2 = bind(prefix + "shared_fc2");
  }
}

at::Tensor ModelState::counted_dense_gradient() const {
  return dense_.grad.narrow(0, 0, parameter_layout_.counted_dense_elements());
}

at::Tensor ModelState::tied_gradient() const {
  if (!shares_embedding_) return {};
  return view(dense_.grad, parameter_layout_.find("embed_tokens"));
}

void ModelState::init_parameters(uint64_t seed, int64_t ep_rank) {
  for (const Parameter& parameter : parameter_layout_.parameters) {
    at::Tensor tensor = view(group_of(parameter).master, parameter);
    if (is_norm(parameter)) {
      tensor.fill_(1.0);
    } else if (parameter.group == ParameterGroup::kDense) {
      at::Generator generator =
          at::make_generator<at::CPUGeneratorImpl>(mix_seed(seed, parameter.name));
      tensor.normal_(0.0, kInitStd, generator);
    } else {
      for (int64_t e = 0; e < experts_local_; ++e) {
        at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(
            mix_seed(mix_seed(seed, parameter.name), ep_rank * experts_local_ + e));
        at::Tensor expert = tensor.select(0, e);
        expert.normal_(0.0, kInitStd, generator);
      }
    }
  }
  refresh_working_copies();
}

void ModelState::refresh_working_copies() {
  if (dtype_ != Dtype::kBf16) return;
  for (Group* group : {&dense_, &expert_}) ops::cast_working_copy(group->master, group->working);
}

void ModelState::zero_gradients() {
  dense_.grad.zero_();
  expert_.grad.zero_();
}

ModelState::NamedTensors ModelState::named(at::Tensor Group::*member,
                                           const std::string& prefix) const {
  NamedTensors tensors;
  for (const Parameter& parameter : parameter_layout_.parameters) {
    tensors.emplace_back(prefix + parameter.name, view(group_of(parameter).*member, parameter));
  }
  return tensors;
}

ModelState::NamedTensors ModelState::parameters() const { return named(&Group::master, ""); }
ModelState::NamedTensors ModelState::gradients() const { return named(&Group::grad, ""); }

ModelState::NamedTensors ModelState::optimizer_state() const {
  NamedTensors tensors = named(&Group::exp_avg, "exp_avg.");
  NamedTensors second = named(&Group::exp_avg_sq, "exp_avg_sq.");
  tensors.insert(tensors.end(), second.begin(), second.end());
  return tensors;
}

ModelState::NamedTensors ModelState::buffers() const {
  NamedTensors tensors;
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (!layers_[i].router_bias.defined()) continue;
    tensors.emplace_back("layers." + std::to_string(i) + ".router_bias", layers_[i].router_bias);
  }
  return tensors;
}

}  // namespace bagualu
