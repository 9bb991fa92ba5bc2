#include "bagualu/runtime/ops/linear.h"

#include <ATen/ATen.h>

#include "bagualu/runtime/ops/dispatch.h"

namespace bagualu::ops {
namespace {

template <class T>
BGL_KERNEL void add_range(float* dst, const T* src, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += simd::kLanes) {
    const int64_t n = end - i;
    simd::store(dst + i, n, simd::load(dst + i, n) + simd::load(src + i, n));
  }
}

}  // namespace

void linear_forward(const at::Tensor& x, const at::Tensor& w, at::Tensor& out) {
  at::mm_out(out, x, w.t());
}

void linear_backward_input(const at::Tensor& dy, const at::Tensor& w, at::Tensor& dx,
                           bool accumulate) {
  if (accumulate) {
    dx.addmm_(dy, w);
  } else {
    at::mm_out(dx, dy, w);
  }
}

void linear_backward_weight(const at::Tensor& dy, const at::Tensor& x, at::Tensor& dw) {
  if (dy.size(0) == 0) return;
  if (dy.scalar_type() == at::kFloat) {
    dw.addmm_(dy.t(), x);
    return;
  }
  at::Tensor product = at::empty({dy.size(1), x.size(1)}, dy.options());
  at::mm_out(product, dy.t(), x);
  accumulate_fp32(dw, product);
}

void accumulate_fp32(at::Tensor& dst, const at::Tensor& src) {
  BGL_CHECK(dst.numel() == src.numel() && dst.is_contiguous() && src.is_contiguous(), dst.numel(),
            src.numel());
  if (!uses_loops(dst)) {
    dst.add_(src);
    return;
  }
  with_element(src, [&]<class T>(T*) {
    at::parallel_for(0, dst.numel(), 16384, [&](int64_t begin, int64_t end) {
      add_range(data<float>(dst), data<T>(src), begin, end);
    });
  });
}

}  // namespace bagualu::ops
