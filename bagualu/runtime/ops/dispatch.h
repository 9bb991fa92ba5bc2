#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

#include "bagualu/base/error.h"
#include "bagualu/runtime/ops/simd.h"

/// Ways from tensors to the row loops; internal to the .cpp files of the folder.
namespace bagualu::ops {

/// Whether our own loops run; other devices, and x86 machines without AVX2, take the ATen calls
/// (which have temporaries that workspace.h does not list).
inline bool uses_loops(const at::Tensor& t) {
  return t.device().is_cpu() && simd::kernels_run_here();
}

template <class T>
T* data(const at::Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

/// Calls f with a null float* or Bf16*, the element type of an activation tensor.
template <class F>
void with_element(const at::Tensor& t, F&& f) {
  if (t.scalar_type() == at::kFloat) {
    f(static_cast<float*>(nullptr));
  } else {
    BGL_CHECK(t.scalar_type() == at::kBFloat16, c10::toString(t.scalar_type()));
    f(static_cast<simd::Bf16*>(nullptr));
  }
}

/// Rows per task that make a task worth a thread (about 16 Ki elements).
inline int64_t row_grain(int64_t row_elements) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, row_elements));
}

/// Splits columns in groups of 16 (a cache line of fp32) and calls f(column_begin, column_end).
template <class F>
void parallel_columns(int64_t rows, int64_t columns, F&& f) {
  constexpr int64_t kGroup = 16;
  const int64_t groups = (columns + kGroup - 1) / kGroup;
  at::parallel_for(0, groups, row_grain(rows * kGroup), [&](int64_t begin, int64_t end) {
    f(begin * kGroup, std::min(columns, end * kGroup));
  });
}

inline void check_rows(const at::Tensor& t, int64_t rows, int64_t columns) {
  BGL_CHECK(t.dim() == 2 && t.size(0) == rows && t.size(1) == columns && t.is_contiguous(), t.dim(),
            t.numel(), rows, columns);
}

}  // namespace bagualu::ops
