#pragma once

#include <ATen/core/Tensor.h>

namespace bagualu::ops {

/// Fills cos, sin fp32 [S, d] with the "rotate half" tables: angle = s * theta^(-2 (j mod d/2) /
/// d).
void rope_tables(double theta, at::Tensor& cos, at::Tensor& sin);

/// Rotates heads in place.
/// Shapes:  x [T, heads, d], last stride 1; cos, sin fp32 [S, d]; row t has position t mod S
void rope_forward_inplace(at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

/// Turns a gradient back by the same angle, in place.
void rope_backward_inplace(at::Tensor& dx, const at::Tensor& cos, const at::Tensor& sin);

namespace detail {
/// The same on ATen calls alone; `sign` is +1 forward, -1 backward.
void rope_inplace_aten(at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign);
}  // namespace detail
}  // namespace bagualu::ops
