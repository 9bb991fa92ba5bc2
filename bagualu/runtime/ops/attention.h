#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace bagualu::ops {

/// How one row of a projected [T, (H + 2G) d] tensor is cut: H query, then G key, G value heads.
struct HeadLayout {
  int64_t batch;
  int64_t seq;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;

  int64_t query_width() const { return heads * head_dim; }
  int64_t key_width() const { return kv_heads * head_dim; }
  int64_t width() const { return query_width() + 2 * key_width(); }
};

/// Views into a [T, (H + 2G) d] tensor as [T, heads, d] (norms, rope).
at::Tensor query_rows(const at::Tensor& qkv, const HeadLayout& layout);
at::Tensor key_rows(const at::Tensor& qkv, const HeadLayout& layout);
at::Tensor value_rows(const at::Tensor& qkv, const HeadLayout& layout);

struct AttentionResult {
  at::Tensor out;  ///< [T, H d] contiguous, own storage of exactly T H d elements
  /// fp32. CPU: [T, H] contiguous, own storage of T H 4 bytes. CUDA: as the kernel made it.
  at::Tensor lse;
};

/// Causal attention with grouped queries, softmax scale 1/sqrt(d).
/// Shapes:  q [T, H, d], k and v [T, G, d]: norms and rope applied, last stride 1; views of one qkv
///          tensor or of storages of their own
/// Ensures: both results are flat, so that a copy of bytes restores them exactly.
/// Workspace beside the results: kMeasured (grows with threads and sequence).
AttentionResult core_attn_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const HeadLayout& layout);

/// Gradient of core_attn_forward with respect to q, k, v, in the layout of qkv.
/// Shapes:  dout, out [T, H d] contiguous; lse as core_attn_forward returned it
/// Returns: dqkv [T, (H + 2G) d], allocated after the kernel's scratch is freed: with
///          X = bytes of dqkv, the peak is X + max(kernel scratch, X) (the kernel makes dq, dk,
///          dv).
at::Tensor core_attn_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                              const HeadLayout& layout);

}  // namespace bagualu::ops
