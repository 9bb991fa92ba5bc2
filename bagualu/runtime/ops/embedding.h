#pragma once

#include <ATen/core/Tensor.h>

namespace bagualu::ops {

/// out[t] = w[ids[t]].
/// Shapes:  ids int64 [T] contiguous; w [V, h]; out [T, h]
/// Throws:  InvalidInput if an id is outside [0, V)
void embedding_forward(const at::Tensor& ids, const at::Tensor& w, at::Tensor& out);

/// dw[ids[t]] += dx[t], tokens in order for every element of dw.
/// Shapes:  dx [T, h]; dw fp32 [V, h]
void embedding_backward(const at::Tensor& ids, const at::Tensor& dx, at::Tensor& dw);

}  // namespace bagualu::ops
