#include <ATen/ATen.h>

#include "bagualu/base/error.h"
#include "bagualu/runtime/executor_context.h"
#include "bagualu/runtime/executor_sites.h"
#include "bagualu/runtime/ops/dropout.h"
#include "bagualu/runtime/ops/embedding.h"
#include "bagualu/runtime/ops/linear.h"
#include "bagualu/runtime/ops/loss.h"
#include "bagualu/runtime/ops/norm.h"
#include "bagualu/runtime/ops/swiglu.h"

namespace bagualu {

void MicrobatchContext::forward_mlp(const OpSpec& op, bool recompute) {
  const LayerWeights* weights = op.layer >= 0 ? &layer(op.layer) : nullptr;
  switch (op.kind) {
    case OpKind::kEmbedding: {
      at::Tensor out = make(op.creates[0], {tokens_, spec_.hidden}, dtype_);
      ops::embedding_forward(input_.ids, shared_.model.embedding().weight, out);
      return;
    }
    case OpKind::kMlpNorm:
    case OpKind::kFinalNorm: {
      const at::Tensor& weight = op.kind == OpKind::kMlpNorm ? weights->mlp_norm.weight
                                                             : shared_.model.final_norm().weight;
      at::Tensor normed = make(op.creates[0], {tokens_, spec_.hidden}, dtype_);
      at::Tensor rstd = make(op.creates[1], {tokens_}, at::kFloat);
      ops::rms_norm_forward(get(op.reads[0]), weight, spec_.rms_eps, normed, rstd);
      return;
    }
    case OpKind::kSharedFc1:
    case OpKind::kMlpFc1: {
      const at::Tensor& weight =
          op.kind == OpKind::kSharedFc1 ? weights->shared_fc1.weight : weights->mlp_fc1.weight;
      at::Tensor out = make(op.creates[0], {tokens_, weight.size(0)}, dtype_);
      ops::linear_forward(get(op.reads[0]), weight, out);
      return;
    }
    case OpKind::kSharedAct:
    case OpKind::kMlpAct: {
      const at::Tensor fc1 = get(op.reads[0]);
      at::Tensor out = make(op.creates[0], {tokens_, fc1.size(1) / 2}, dtype_);
      ops::swiglu_forward(fc1, at::Tensor(), out);
      return;
    }
    case OpKind::kSharedFc2: {
      at::Tensor out = make(op.creates[0], {tokens_, spec_.hidden}, dtype_);
      ops::linear_forward(get(op.reads[0]), weights->shared_fc2.weight, out);
      return;
    }
    case OpKind::kMlpFc2: {
      at::Tensor out = make(op.creates[0], {tokens_, spec_.hidden}, dtype_);
      ops::linear_forward(get(op.reads[0]), weights->mlp_fc2.weight, out);
      ops::dropout_forward_inplace(out, dropout(), dropout_seed(op.layer, kAfterMlp));
      out.add_(get(op.reads[1]));
      return;
    }
    case OpKind::kLmHead:
      return forward_lm_head(op, recompute);
    default:
      throw InternalError("not a dense operator: " + op.name);
  }
}

void MicrobatchContext::forward_lm_head(const OpSpec& op, bool recompute) {
  at::Tensor log_probs = make(op.creates[0], {tokens_, spec_.vocab}, at::kFloat);
  const at::Tensor normed = get(op.reads[0]);
  // In fp32 the logits are made where the log-probabilities will stand.
  at::Tensor logits = dtype_ == at::kFloat ? log_probs : scratch({tokens_, spec_.vocab}, dtype_);
  ops::linear_forward(normed, shared_.model.lm_head().weight, logits);
  const double loss = ops::loss_forward(logits, input_.targets, log_probs);
  if (!recompute) losses_.cross_entropy_sum += loss;  // a side effect that must happen once
  if (shared_.capture && !recompute) {
    shared_.captured = log_probs.clone();
    shared_.capture = false;
  }
}

void MicrobatchContext::backward_lm_head(const OpSpec& op) {
  at::Tensor log_probs = get(op.bwd_saved[0]);
  const at::Tensor normed = get(op.bwd_saved[1]);
  at::Tensor d_normed = make(op.bwd_creates[0], {tokens_, spec_.hidden}, dtype_);
  at::Tensor d_logits = dtype_ == at::kFloat ? log_probs : scratch({tokens_, spec_.vocab}, dtype_);
  ops::loss_backward(log_probs, input_.targets, input_.loss_scale, d_logits);
  at::Tensor grad = shared_.model.lm_head().grad;
  ops::linear_backward_weight(d_logits, normed, grad);
  ops::linear_backward_input(d_logits, shared_.model.lm_head().weight, d_normed, false);
}

void MicrobatchContext::backward_mlp(const OpSpec& op, BackwardPart part) {
  LayerWeights* weights = op.layer >= 0 ? &layer(op.layer) : nullptr;
  switch (op.kind) {
    case OpKind::kEmbedding: {
      at::Tensor grad = shared_.model.embedding().grad;
      ops::embedding_backward(input_.ids, get(op.bwd_reads[0]), grad);
      return;
    }
    case OpKind::kMlpNorm: {
      at::Tensor d_hidden = get(op.bwd_reads[1]);
      ops::rms_norm_backward(get(op.bwd_reads[0]), get(op.bwd_saved[0]), weights->mlp_norm.weight,
                             get(op.bwd_saved[1]), d_hidden, true, weights->mlp_norm.grad);
      return;
    }
    case OpKind::kFinalNorm: {
      at::Tensor d_hidden = make(op.bwd_creates[0], {tokens_, spec_.hidden}, dtype_);
      at::Tensor grad = shared_.model.final_norm().grad;
      ops::rms_norm_backward(get(op.bwd_reads[0]), get(op.bwd_saved[0]),
                             shared_.model.final_norm().weight, get(op.bwd_saved[1]), d_hidden,
                             false, grad);
      return;
    }
    case OpKind::kSharedFc1:
    case OpKind::kMlpFc1: {
      // The dense MLP makes the gradient of its input; the shared expert adds to the routed one's.
      const bool creates = !op.bwd_creates.empty();
      WeightAndGrad& fc1 = op.kind == OpKind::kSharedFc1 ? weights->shared_fc1 : weights->mlp_fc1;
      const at::Tensor d_fc1 = get(op.bwd_reads[0]);
      at::Tensor d_normed =
          creates ? make(op.bwd_creates[0], {tokens_, spec_.hidden}, dtype_) : get(op.bwd_reads[1]);
      if (part == BackwardPart::kWhole) {
        ops::linear_backward_weight(d_fc1, get(op.bwd_saved[0]), fc1.grad);
      }
      ops::linear_backward_input(d_fc1, fc1.weight, d_normed, !creates);
      return;
    }
    case OpKind::kSharedAct:
    case OpKind::kMlpAct: {
      const at::Tensor fc1 = get(op.bwd_saved[0]);
      at::Tensor d_fc1 = make(op.bwd_creates[0], fc1.sizes(), dtype_);
      at::Tensor no_probs;
      ops::swiglu_backward(get(op.bwd_reads[0]), fc1, no_probs, d_fc1, no_probs);
      return;
    }
    case OpKind::kSharedFc2:
    case OpKind::kMlpFc2: {
      const bool shared = op.kind == OpKind::kSharedFc2;  // its gradient is masked already
      WeightAndGrad& fc2 = shared ? weights->shared_fc2 : weights->mlp_fc2;
      const at::Tensor act = get(op.bwd_saved[0]);
      at::Tensor d_act = make(op.bwd_creates[0], act.sizes(), dtype_);
      const at::Tensor gradient = output_gradient(op, shared ? kMasked : kAfterMlp, part);
      if (part == BackwardPart::kWhole) ops::linear_backward_weight(gradient, act, fc2.grad);
      ops::linear_backward_input(gradient, fc2.weight, d_act, false);
      return;
    }
    case OpKind::kLmHead:
      return backward_lm_head(op);
    default:
      throw InternalError("not a dense operator: " + op.name);
  }
}

}  // namespace bagualu
