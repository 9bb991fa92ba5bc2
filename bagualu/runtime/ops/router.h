#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace bagualu::ops {

struct RouterOptions {
  int64_t top_k = 0;
  bool norm_topk_prob = true;  ///< divide the chosen gate values by their sum
  double aux_loss_coef = 0;    ///< times E * sum_e f_e P_e, per layer
  double z_loss_coef = 0;      ///< times mean(lse^2)
};

/// Losses of one layer and micro-batch, coefficient included.
struct RouterLosses {
  double aux = 0;
  double z = 0;
};

/// logits = x w^T (+ logits_bias), in fp32 (bf16: the product is rounded to bf16 first).
/// Shapes:  x [T, h]; w [E, h]; logits_bias fp32 [E] or undefined; logits fp32 [T, E]
/// Workspace: part of router_forward_workspace_bytes.
void router_logits(const at::Tensor& x, const at::Tensor& w, const at::Tensor& logits_bias,
                   at::Tensor& logits);

/// Picks the k largest of logits' softmax + selection_bias, ties to the lowest expert, slots by
/// falling score; topk_probs are the softmax values at these ids (without the selection bias).
/// Shapes:  selection_bias fp32 [E] or undefined; topk_ids int16 or int32 [T, k]; topk_probs
///          fp32 [T, k]
/// Requires: with `ids_given` (replay) topk_ids are read, not chosen; ids of a token are distinct.
RouterLosses router_select(const at::Tensor& logits, const at::Tensor& selection_bias,
                           const RouterOptions& options, bool ids_given, at::Tensor& topk_ids,
                           at::Tensor& topk_probs);

/// router_logits, then router_select. Workspace: router_forward_workspace_bytes.
RouterLosses router_forward(const at::Tensor& x, const at::Tensor& w,
                            const at::Tensor& selection_bias, const at::Tensor& logits_bias,
                            const RouterOptions& options, bool ids_given, at::Tensor& logits,
                            at::Tensor& topk_ids, at::Tensor& topk_probs);

/// Gradient of the gate values and of both losses (the losses' scaled by `loss_scale`).
/// Shapes:  d_topk_probs fp32 [T, k]; x [T, h]; w [E, h]; dx [T, h] added to; dw fp32 [E, h] added
/// to Ensures: logits are overwritten by their gradient. Workspace: router_backward_workspace_bytes
/// (0 in fp32).
void router_backward(const at::Tensor& d_topk_probs, const at::Tensor& topk_ids,
                     const at::Tensor& x, const at::Tensor& w, const RouterOptions& options,
                     double loss_scale, at::Tensor& logits, at::Tensor& dx, at::Tensor& dw);

/// The same in two parts, with the same bits: first dx, and the logits' gradient in their place ...
/// Workspace: router_input_grad_workspace_bytes (0 in fp32).
void router_input_grad(const at::Tensor& d_topk_probs, const at::Tensor& topk_ids,
                       const at::Tensor& w, const RouterOptions& options, double loss_scale,
                       at::Tensor& logits, at::Tensor& dx);
/// ... then, any time later, dw from that gradient. Workspace: router_backward_workspace_bytes.
void router_weight_grad(const at::Tensor& d_logits, const at::Tensor& x, at::Tensor& dw);

namespace detail {
/// The same on ATen calls alone.
RouterLosses router_select_aten(const at::Tensor& logits, const at::Tensor& selection_bias,
                                const RouterOptions& options, bool ids_given, at::Tensor& topk_ids,
                                at::Tensor& topk_probs);
void router_gradient_aten(const at::Tensor& d_topk_probs, const at::Tensor& topk_ids,
                          const at::Tensor& aux_slopes, double z_slope,
                          const RouterOptions& options, at::Tensor& logits);
}  // namespace detail
}  // namespace bagualu::ops
