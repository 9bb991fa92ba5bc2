#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace bagualu::ops {

/// Rounds floating values to int8 codes with one fp32 scale per block of 128 elements, in the order
/// they lie in memory (layout: cost/block_codes.h).
/// Shapes:  values fp32 or bf16, dense, any shape and strides; codes uint8 [n], 64-byte aligned
/// Requires: n >= block_code_bytes(bytes of values, element size); what is beyond is not written.
/// Ensures: |decoded - value| <= largest magnitude of the block / 254, before rounding to the type
///          of `values`; a block with a value that is not finite decodes to NaN. Same bits for any
///          number of threads.
void quantise_encode(const at::Tensor& values, at::Tensor& codes);

/// The inverse, into a tensor with the layout of the encoded one.
void quantise_decode(const at::Tensor& codes, at::Tensor& values);

namespace detail {
/// The same on ATen calls alone, for devices without a loop of ours.
void quantise_encode_aten(const at::Tensor& values, at::Tensor& codes);
void quantise_decode_aten(const at::Tensor& codes, at::Tensor& values);
}  // namespace detail
}  // namespace bagualu::ops
