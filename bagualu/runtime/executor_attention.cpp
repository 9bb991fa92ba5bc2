#include <ATen/ATen.h>

#include "bagualu/base/error.h"
#include "bagualu/runtime/executor_context.h"
#include "bagualu/runtime/executor_sites.h"
#include "bagualu/runtime/ops/attention.h"
#include "bagualu/runtime/ops/dropout.h"
#include "bagualu/runtime/ops/linear.h"
#include "bagualu/runtime/ops/norm.h"
#include "bagualu/runtime/ops/rope.h"

// Storages are taken from an operator's lists by position, in the order that
// graph/native_moe.cpp states them.

namespace bagualu {
namespace {

ops::HeadLayout head_layout(const ModelSpec& spec, const ExecutorOptions& options) {
  return {options.micro_batch_size, options.seq, spec.heads, spec.kv_heads, spec.head_dim};
}

}  // namespace

void MicrobatchContext::forward_attention(const OpSpec& op) {
  const LayerWeights& weights = layer(op.layer);
  const ops::HeadLayout heads = head_layout(spec_, options_);
  switch (op.kind) {
    case OpKind::kAttnNorm: {
      at::Tensor normed = make(op.creates[0], {tokens_, spec_.hidden}, dtype_);
      at::Tensor rstd = make(op.creates[1], {tokens_}, at::kFloat);
      ops::rms_norm_forward(get(op.reads[0]), weights.attn_norm.weight, spec_.rms_eps, normed,
                            rstd);
      return;
    }
    case OpKind::kQkv: {
      at::Tensor qkv = make(op.creates[0], {tokens_, heads.width()}, dtype_);
      ops::linear_forward(get(op.reads[0]), weights.qkv.weight, qkv);
      if (spec_.qk_norm) return;
      at::Tensor q = ops::query_rows(qkv, heads), k = ops::key_rows(qkv, heads);
      ops::rope_forward_inplace(q, shared_.rope_cos, shared_.rope_sin);
      ops::rope_forward_inplace(k, shared_.rope_cos, shared_.rope_sin);
      return;
    }
    case OpKind::kQkNorm: {
      const at::Tensor qkv = get(op.reads[0]);
      at::Tensor q = make(op.creates[0], {tokens_, spec_.heads, spec_.head_dim}, dtype_);
      at::Tensor k = make(op.creates[1], {tokens_, spec_.kv_heads, spec_.head_dim}, dtype_);
      at::Tensor q_rstd = make(op.creates[2], {tokens_, spec_.heads}, at::kFloat);
      at::Tensor k_rstd = make(op.creates[3], {tokens_, spec_.kv_heads}, at::kFloat);
      ops::rms_norm_forward(ops::query_rows(qkv, heads), weights.q_norm.weight, spec_.rms_eps, q,
                            q_rstd);
      ops::rms_norm_forward(ops::key_rows(qkv, heads), weights.k_norm.weight, spec_.rms_eps, k,
                            k_rstd);
      ops::rope_forward_inplace(q, shared_.rope_cos, shared_.rope_sin);
      ops::rope_forward_inplace(k, shared_.rope_cos, shared_.rope_sin);
      return;
    }
    case OpKind::kCoreAttn: {
      const at::Tensor qkv = get(op.reads[0]);
      const at::Tensor q = spec_.qk_norm ? get(op.reads[1]) : ops::query_rows(qkv, heads);
      const at::Tensor k = spec_.qk_norm ? get(op.reads[2]) : ops::key_rows(qkv, heads);
      ops::AttentionResult result =
          ops::core_attn_forward(q, k, ops::value_rows(qkv, heads), heads);
      adopt(op.creates[0], std::move(result.out));
      adopt(op.creates[1], std::move(result.lse));
      return;
    }
    case OpKind::kAttnProj: {
      at::Tensor out = make(op.creates[0], {tokens_, spec_.hidden}, dtype_);
      ops::linear_forward(get(op.reads[0]), weights.attn_proj.weight, out);
      ops::dropout_forward_inplace(out, dropout(), dropout_seed(op.layer, kAfterAttention));
      out.add_(get(op.reads[1]));
      return;
    }
    default:
      throw InternalError("not an attention operator: " + op.name);
  }
}

void MicrobatchContext::backward_attention(const OpSpec& op, BackwardPart part) {
  LayerWeights& weights = layer(op.layer);
  const ops::HeadLayout heads = head_layout(spec_, options_);
  switch (op.kind) {
    case OpKind::kAttnNorm: {
      at::Tensor d_hidden = get(op.bwd_reads[1]);
      ops::rms_norm_backward(get(op.bwd_reads[0]), get(op.bwd_saved[0]), weights.attn_norm.weight,
                             get(op.bwd_saved[1]), d_hidden, true, weights.attn_norm.grad);
      return;
    }
    case OpKind::kQkv: {
      const at::Tensor d_qkv = get(op.bwd_reads[0]);
      at::Tensor d_normed = make(op.bwd_creates[0], {tokens_, spec_.hidden}, dtype_);
      if (part == BackwardPart::kWhole) {
        ops::linear_backward_weight(d_qkv, get(op.bwd_saved[0]), weights.qkv.grad);
      }
      ops::linear_backward_input(d_qkv, weights.qkv.weight, d_normed, false);
      return;
    }
    case OpKind::kQkNorm: {
      const at::Tensor qkv = get(op.bwd_saved[0]), d_qkv = get(op.bwd_reads[0]);
      at::Tensor dq = ops::query_rows(d_qkv, heads), dk = ops::key_rows(d_qkv, heads);
      ops::rope_backward_inplace(dq, shared_.rope_cos, shared_.rope_sin);
      ops::rope_backward_inplace(dk, shared_.rope_cos, shared_.rope_sin);
      ops::rms_norm_backward(dq, ops::query_rows(qkv, heads), weights.q_norm.weight,
                             get(op.bwd_saved[1]), dq, false, weights.q_norm.grad);
      ops::rms_norm_backward(dk, ops::key_rows(qkv, heads), weights.k_norm.weight,
                             get(op.bwd_saved[2]), dk, false, weights.k_norm.grad);
      return;
    }
    case OpKind::kCoreAttn: {
      const at::Tensor qkv = get(op.bwd_saved[0]);
      const size_t results = spec_.qk_norm ? 3 : 1;
      const at::Tensor q = spec_.qk_norm ? get(op.bwd_saved[1]) : ops::query_rows(qkv, heads);
      const at::Tensor k = spec_.qk_norm ? get(op.bwd_saved[2]) : ops::key_rows(qkv, heads);
      at::Tensor d_qkv = ops::core_attn_backward(
          get(op.bwd_reads[0]), q, k, ops::value_rows(qkv, heads), get(op.bwd_saved[results]),
          get(op.bwd_saved[results + 1]), heads);
      if (!spec_.qk_norm) {
        at::Tensor dq = ops::query_rows(d_qkv, heads), dk = ops::key_rows(d_qkv, heads);
        ops::rope_backward_inplace(dq, shared_.rope_cos, shared_.rope_sin);
        ops::rope_backward_inplace(dk, shared_.rope_cos, shared_.rope_sin);
      }
      adopt(op.bwd_creates[0], std::move(d_qkv));
      return;
    }
    case OpKind::kAttnProj: {
      at::Tensor d_out = make(op.bwd_creates[0], {tokens_, spec_.heads * spec_.head_dim}, dtype_);
      const at::Tensor gradient = output_gradient(op, kAfterAttention, part);
      if (part == BackwardPart::kWhole) {
        ops::linear_backward_weight(gradient, get(op.bwd_saved[0]), weights.attn_proj.grad);
      }
      ops::linear_backward_input(gradient, weights.attn_proj.weight, d_out, false);
      return;
    }
    default:
      throw InternalError("not an attention operator: " + op.name);
  }
}

}  // namespace bagualu
