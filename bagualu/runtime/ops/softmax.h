#pragma once

#include "bagualu/runtime/ops/simd.h"

namespace bagualu::ops::simd {

/// log(sum_j exp(row[j])) of one row of either type; see Note [Bits of a row].
template <class T>
BGL_INLINE float log_sum_exp(const T* row, int64_t width) {
  Lanes largest = splat(-INFINITY);
  for (int64_t j = 0; j < width; j += kLanes) {
    largest = max(largest, keep(load(row + j, width - j), width - j, -INFINITY));
  }
  const float top = max(largest);
  Lanes total = {};
  for (int64_t j = 0; j < width; j += kLanes) {
    total += keep(exp(load(row + j, width - j) - top), width - j, 0.0f);
  }
  return top + std::log(sum(total));
}

}  // namespace bagualu::ops::simd
