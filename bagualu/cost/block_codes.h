#pragma once

#include <cstdint>

#include "bagualu/base/units.h"

namespace bagualu {

/// Layout of an encoded copy, in one buffer: an fp32 scale per started block, then one int8 code per
/// element. Value = code * scale.
inline constexpr int64_t kCodeBlockElements = 128;
inline constexpr int64_t kCodeScaleBytes = 4;

constexpr int64_t code_blocks(int64_t elements) {
  return (elements + kCodeBlockElements - 1) / kCodeBlockElements;
}

/// Bytes of the encoded copy of `bytes` bytes of elements of this size.
/// Requires: element_bytes > 0.
inline int64_t block_code_bytes(int64_t bytes, int64_t element_bytes) {
  const int64_t elements = round_up(bytes, element_bytes) / element_bytes;
  return elements + code_blocks(elements) * kCodeScaleBytes;
}

}  // namespace bagualu
