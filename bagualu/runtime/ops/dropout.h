#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace bagualu::ops {

/// Zeroes each element of y with probability p and divides the others by 1 - p. The mask is a pure
/// function of (seed, element index): nothing is stored, forward, recompute and backward agree.
/// Requires: y contiguous; 0 <= p < 1. With p == 0 nothing is done.
void dropout_forward_inplace(at::Tensor& y, double p, uint64_t seed);

/// out = dy * mask / (1 - p). out may be dy.
void dropout_backward(const at::Tensor& dy, double p, uint64_t seed, at::Tensor& out);

}  // namespace bagualu::ops
