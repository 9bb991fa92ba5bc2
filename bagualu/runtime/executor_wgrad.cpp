#include <ATen/ATen.h>

#include "bagualu/base/error.h"
#include "bagualu/runtime/executor_context.h"
#include "bagualu/runtime/ops/experts.h"
#include "bagualu/runtime/ops/linear.h"
#include "bagualu/runtime/ops/router.h"

namespace bagualu {

// Reads its two lists by position, as graph/native_moe.cpp states them; adds what the whole
// backward would have added, with the same kernels.
void MicrobatchContext::weight_grad(int index) {
  const OpSpec& op = graph_->ops[index];
  BGL_CHECK(op.has_wgrad, op.name);
  LayerWeights& weights = layer(op.layer);
  const auto linear = [&](WeightAndGrad& of) {
    ops::linear_backward_weight(get(op.wgrad_reads[0]), get(op.wgrad_saved[0]), of.grad);
  };
  switch (op.kind) {
    case OpKind::kQkv:
      return linear(weights.qkv);
    case OpKind::kAttnProj:
      return linear(weights.attn_proj);
    case OpKind::kSharedFc1:
      return linear(weights.shared_fc1);
    case OpKind::kSharedFc2:
      return linear(weights.shared_fc2);
    case OpKind::kMlpFc1:
      return linear(weights.mlp_fc1);
    case OpKind::kMlpFc2:
      return linear(weights.mlp_fc2);
    case OpKind::kRouter:
      return ops::router_weight_grad(get(op.wgrad_saved[0]), get(op.wgrad_saved[1]),
                                     weights.router.grad);
    case OpKind::kExperts:
      return weight_grad_of_experts(op);
    default:
      throw InternalError("no weight gradient apart: " + op.name);
  }
}

void MicrobatchContext::weight_grad_of_experts(const OpSpec& op) {
  LayerWeights& weights = layer(op.layer);
  const at::Tensor in = get(op.wgrad_saved[0]), act = get(op.wgrad_saved[1]);
  const at::Tensor d_fc1 = get(op.wgrad_reads[0]), d_out = get(op.wgrad_reads[1]);
  for (const ExpertPiece& piece : routing(op.layer).pieces) {
    at::Tensor dw1 = weights.expert_fc1.grad.select(0, piece.expert);
    at::Tensor dw2 = weights.expert_fc2.grad.select(0, piece.expert);
    const auto rows_of = [&piece](const at::Tensor& all) {
      return all.narrow(0, piece.row_begin, piece.rows);
    };
    ops::experts_weight_grad_piece(rows_of(d_out), rows_of(in), rows_of(act), rows_of(d_fc1), dw1,
                                   dw2);
  }
}

}  // namespace bagualu
