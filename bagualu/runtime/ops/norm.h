#pragma once

#include <ATen/core/Tensor.h>

namespace bagualu::ops {

/// RMS norm over the last dimension: out = x * rstd * w.
/// Shapes:  x, out [T, h] or [T, heads, d], last stride 1 (views into a wider row are fine);
///          w [h]; rstd fp32 contiguous [T] or [T, heads]
/// Requires: x, out, w of one dtype (fp32 or bf16). out may be x.
void rms_norm_forward(const at::Tensor& x, const at::Tensor& w, double eps, at::Tensor& out,
                      at::Tensor& rstd);

/// Gradient of rms_norm_forward.
/// Shapes:  dy, x, dx as x above; dw fp32 [h]
/// Ensures: dx += gradient, or dx = gradient when not `accumulate`; dw += gradient, summed over
/// rows
///          in one fixed order.
/// Requires: dx may be dy (not `accumulate`); dx is not x.
void rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w,
                       const at::Tensor& rstd, at::Tensor& dx, bool accumulate, at::Tensor& dw);

namespace detail {
/// The same on ATen calls alone, for devices without a loop of ours.
void rms_norm_forward_aten(const at::Tensor& x, const at::Tensor& w, double eps, at::Tensor& out,
                           at::Tensor& rstd);
void rms_norm_backward_aten(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w,
                            const at::Tensor& rstd, at::Tensor& dx, bool accumulate,
                            at::Tensor& dw);
}  // namespace detail
}  // namespace bagualu::ops
