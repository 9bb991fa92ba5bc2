#pragma once

#include <ATen/core/Tensor.h>

namespace bagualu::ops {

/// out = silu(gate) * up * prob.
/// Shapes:  fc1 [P, 2f] (gate | up); probs fp32 [P] or undefined (= 1); out [P, f]; contiguous
void swiglu_forward(const at::Tensor& fc1, const at::Tensor& probs, at::Tensor& out);

/// Gradient of swiglu_forward. dprobs is written (not added to) if defined.
/// Shapes:  dout [P, f]; dfc1 [P, 2f]; dprobs fp32 [P] or undefined
/// Requires: dfc1 may be fc1 (each element is read before it is written).
void swiglu_backward(const at::Tensor& dout, const at::Tensor& fc1, const at::Tensor& probs,
                     at::Tensor& dfc1, at::Tensor& dprobs);

namespace detail {
/// The same on ATen calls alone.
void swiglu_forward_aten(const at::Tensor& fc1, const at::Tensor& probs, at::Tensor& out);
void swiglu_backward_aten(const at::Tensor& dout, const at::Tensor& fc1, const at::Tensor& probs,
                          at::Tensor& dfc1, at::Tensor& dprobs);
}  // namespace detail
}  // namespace bagualu::ops
