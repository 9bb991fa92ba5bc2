#include "bagualu/runtime/ops/attention.h"

#include <ATen/ATen.h>

#include "bagualu/runtime/ops/dispatch.h"

namespace bagualu::ops {
namespace {

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

at::Tensor head_rows(const at::Tensor& qkv, const HeadLayout& layout, int64_t begin,
                     int64_t heads) {
  BGL_CHECK(qkv.dim() == 2 && qkv.size(1) == layout.width(), qkv.size(-1), layout.width());
  return qkv.narrow(1, begin, heads * layout.head_dim).unflatten(1, {heads, layout.head_dim});
}

// [T, heads, d] -> [B, heads, S, d], no copy.
at::Tensor by_head(const at::Tensor& rows, const HeadLayout& layout) {
  return rows.unflatten(0, {layout.batch, layout.seq}).transpose(1, 2);
}

// [T, heads * d] -> [B, heads, S, d], no copy.
at::Tensor flat_by_head(const at::Tensor& flat, const HeadLayout& layout) {
  return flat.view({layout.batch, layout.seq, layout.heads, layout.head_dim}).transpose(1, 2);
}

// [B, heads, S, ...] as the kernels make it, laid out token by token -> [T, rest].
at::Tensor flatten_tokens(const at::Tensor& by_head, const HeadLayout& layout) {
  const at::Tensor by_token = by_head.transpose(1, 2);
  BGL_CHECK(by_token.is_contiguous(), by_head.dim(), by_head.stride(1));
  return by_token.view({layout.batch * layout.seq, -1});
}

// The memory-efficient kernel knows no grouped queries: repeat each key head for its group.
at::Tensor repeat_heads(const at::Tensor& kv, const HeadLayout& layout) {
  return kv.repeat_interleave(layout.heads / layout.kv_heads, /*dim=*/1);
}

at::Tensor sum_groups(const at::Tensor& gradient, const HeadLayout& layout) {
  return gradient.unflatten(1, {layout.kv_heads, layout.heads / layout.kv_heads}).sum(2);
}

AttentionResult forward_cuda(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const HeadLayout& layout) {
  if (q.scalar_type() == at::kBFloat16) {
    const auto result = at::_scaled_dot_product_flash_attention(q, k, v, 0.0, /*is_causal=*/true);
    return {flatten_tokens(std::get<0>(result), layout), std::get<1>(result)};
  }
  const auto result = at::_scaled_dot_product_efficient_attention(
      q, repeat_heads(k, layout), repeat_heads(v, layout), /*attn_bias=*/{},
      /*compute_log_sumexp=*/true, 0.0, /*is_causal=*/true);
  return {flatten_tokens(std::get<0>(result), layout), std::get<1>(result)};
}

Gradients backward_cuda(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                        const HeadLayout& layout) {
  // Without dropout the kernels ignore the generator's state, but want a tensor there.
  const at::Tensor no_seed = at::zeros({2}, q.options().dtype(at::kLong));
  if (q.scalar_type() == at::kBFloat16) {
    return at::_scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, /*cum_seq_q=*/{}, /*cum_seq_k=*/{}, layout.seq, layout.seq, 0.0,
        /*is_causal=*/true, no_seed, no_seed);
  }
  const auto [dq, dk, dv, dbias] = at::_scaled_dot_product_efficient_attention_backward(
      dout, q, repeat_heads(k, layout), repeat_heads(v, layout), /*attn_bias=*/{}, out, lse,
      no_seed[0], no_seed[1], 0.0, {true, true, true, false}, /*is_causal=*/true);
  return {dq, sum_groups(dk, layout), sum_groups(dv, layout)};
}

}  // namespace

at::Tensor query_rows(const at::Tensor& qkv, const HeadLayout& layout) {
  return head_rows(qkv, layout, 0, layout.heads);
}

at::Tensor key_rows(const at::Tensor& qkv, const HeadLayout& layout) {
  return head_rows(qkv, layout, layout.query_width(), layout.kv_heads);
}

at::Tensor value_rows(const at::Tensor& qkv, const HeadLayout& layout) {
  return head_rows(qkv, layout, layout.query_width() + layout.key_width(), layout.kv_heads);
}

AttentionResult core_attn_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const HeadLayout& layout) {
  const at::Tensor queries = by_head(q, layout);
  const at::Tensor keys = by_head(k, layout);
  const at::Tensor values = by_head(v, layout);
  if (q.device().is_cuda()) return forward_cuda(queries, keys, values, layout);
  const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(queries, keys, values,
                                                                          0.0, /*is_causal=*/true);
  return {flatten_tokens(out, layout), flatten_tokens(lse, layout)};
}

at::Tensor core_attn_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                              const HeadLayout& layout) {
  const at::Tensor queries = by_head(q, layout);
  const at::Tensor keys = by_head(k, layout);
  const at::Tensor values = by_head(v, layout);
  const at::Tensor incoming = flat_by_head(dout, layout);
  const at::Tensor result = flat_by_head(out, layout);
  Gradients gradients;
  if (q.device().is_cuda()) {
    gradients = backward_cuda(incoming, queries, keys, values, result, lse, layout);
  } else {
    const at::Tensor sums =
        lse.view({layout.batch, layout.seq, layout.heads}).transpose(1, 2);  // strides as made
    gradients = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        incoming, queries, keys, values, result, sums, 0.0, /*is_causal=*/true);
  }
  at::Tensor dqkv = at::empty({layout.batch * layout.seq, layout.width()}, q.options());
  by_head(query_rows(dqkv, layout), layout).copy_(std::get<0>(gradients));
  by_head(key_rows(dqkv, layout), layout).copy_(std::get<1>(gradients));
  by_head(value_rows(dqkv, layout), layout).copy_(std::get<2>(gradients));
  return dqkv;
}

}  // namespace bagualu::ops
