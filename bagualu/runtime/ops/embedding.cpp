#include "bagualu/runtime/ops/embedding.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "bagualu/runtime/ops/dispatch.h"

namespace bagualu::ops {
namespace {

template <class T>
BGL_KERNEL void add_columns(const int64_t* ids, int64_t tokens, int64_t width, const T* dx,
                            float* dw, int64_t begin, int64_t end) {
  for (int64_t t = 0; t < tokens; ++t) {
    float* target = dw + ids[t] * width;
    const T* row = dx + t * width;
    for (int64_t j = begin; j < end; j += simd::kLanes) {
      const int64_t n = end - j;
      simd::store(target + j, n, simd::load(target + j, n) + simd::load(row + j, n));
    }
  }
}

void check_ids(const at::Tensor& ids, int64_t vocab) {
  BGL_CHECK(ids.scalar_type() == at::kLong && ids.is_contiguous(), ids.numel());
  if (!ids.device().is_cpu()) return;  // a check would wait for the device; the kernel asserts
  const int64_t* values = ids.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < ids.numel(); ++t) {
    if (values[t] < 0 || values[t] >= vocab) {
      throw InvalidInput("tokens", fmt::format("token {}", t), fmt::format("{}", values[t]),
                         fmt::format("0 to {}", vocab - 1));
    }
  }
}

}  // namespace

void embedding_forward(const at::Tensor& ids, const at::Tensor& w, at::Tensor& out) {
  check_rows(out, ids.numel(), w.size(1));
  BGL_CHECK(w.is_contiguous() && w.scalar_type() == out.scalar_type(), w.size(0));
  check_ids(ids, w.size(0));
  if (!uses_loops(w)) {
    at::index_select_out(out, w, 0, ids);
    return;
  }
  const int64_t row_bytes = w.size(1) * w.element_size();
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const char* table = static_cast<const char*>(w.const_data_ptr());
  char* rows = static_cast<char*>(out.data_ptr());
  at::parallel_for(0, ids.numel(), row_grain(w.size(1)), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::memcpy(rows + t * row_bytes, table + id[t] * row_bytes, row_bytes);
    }
  });
}

void embedding_backward(const at::Tensor& ids, const at::Tensor& dx, at::Tensor& dw) {
  check_rows(dx, ids.numel(), dw.size(1));
  BGL_CHECK(dw.is_contiguous() && dw.scalar_type() == at::kFloat, dw.size(0));
  if (!uses_loops(dw)) {
    // Sorts the ids, so equal ids are added in one order.
    dw.index_put_({ids}, dx.to(at::kFloat), /*accumulate=*/true);
    return;
  }
  with_element(dx, [&]<class T>(T*) {
    parallel_columns(ids.numel(), dw.size(1), [&](int64_t begin, int64_t end) {
      add_columns<T>(ids.const_data_ptr<int64_t>(), ids.numel(), dw.size(1), data<T>(dx),
                     data<float>(dw), begin, end);
    });
  });
}

}  // namespace bagualu::ops
