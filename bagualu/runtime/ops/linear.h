#pragma once

#include <ATen/core/Tensor.h>

namespace bagualu::ops {

/// out = x w^T.
/// Shapes: x [rows, in]; w [out, in]; out [rows, out]
void linear_forward(const at::Tensor& x, const at::Tensor& w, at::Tensor& out);

/// dx = dy w, or dx += dy w when `accumulate`.
void linear_backward_input(const at::Tensor& dy, const at::Tensor& w, at::Tensor& dx,
                           bool accumulate);

/// dw += dy^T x, in fp32. Workspace: linear_backward_weight_workspace_bytes.
void linear_backward_weight(const at::Tensor& dy, const at::Tensor& x, at::Tensor& dw);

/// dst += src for fp32 dst and src of either dtype, without ATen's fp32 copy of a bf16 src.
/// Requires: both contiguous, same number of elements.
void accumulate_fp32(at::Tensor& dst, const at::Tensor& src);

}  // namespace bagualu::ops
