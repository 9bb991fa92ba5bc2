#include "bagualu/runtime/ops/rope.h"

#include <ATen/ATen.h>

#include "bagualu/runtime/ops/dispatch.h"

namespace bagualu::ops {
namespace {

struct RotatedView {
  int64_t heads;
  int64_t half;
  int64_t token_stride;
  int64_t head_stride;
  int64_t positions;
};

// Pairs (j, j + d/2): (a, b) -> (a cos - b sin, b cos + a sin), sin times `sign`.
template <class T>
BGL_KERNEL void rotate_rows(T* x, const RotatedView& view, const float* cos, const float* sin,
                            float sign, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const int64_t table = t % view.positions * 2 * view.half;
    for (int64_t head = 0; head < view.heads; ++head) {
      T* low = x + t * view.token_stride + head * view.head_stride;
      T* high = low + view.half;
      for (int64_t j = 0; j < view.half; j += simd::kLanes) {
        const int64_t n = view.half - j;
        const simd::Lanes c = simd::load(cos + table + j, n);
        const simd::Lanes s = simd::load(sin + table + j, n) * sign;
        const simd::Lanes a = simd::load(low + j, n);
        const simd::Lanes b = simd::load(high + j, n);
        simd::store(low + j, n, a * c - b * s);
        simd::store(high + j, n, b * c + a * s);
      }
    }
  }
}

void rotate(at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign) {
  BGL_CHECK(x.dim() == 3 && x.stride(2) == 1 && x.size(2) % 2 == 0, x.dim(), x.size(-1));
  BGL_CHECK(cos.size(1) == x.size(2) && cos.is_contiguous() && sin.is_contiguous(), cos.size(1),
            x.size(2));
  if (!uses_loops(x)) return detail::rope_inplace_aten(x, cos, sin, sign);
  with_element(x, [&]<class T>(T*) {
    const RotatedView view{x.size(1), x.size(2) / 2, x.stride(0), x.stride(1), cos.size(0)};
    at::parallel_for(0, x.size(0), row_grain(x.size(1) * x.size(2)),
                     [&](int64_t begin, int64_t end) {
                       rotate_rows<T>(data<T>(x), view, data<float>(cos), data<float>(sin),
                                      static_cast<float>(sign), begin, end);
                     });
  });
}

}  // namespace

void rope_tables(double theta, at::Tensor& cos, at::Tensor& sin) {
  const int64_t half = cos.size(1) / 2;
  const at::TensorOptions options = cos.options();
  const at::Tensor exponents = at::arange(half, options).mul_(2).div_(2 * half);
  const at::Tensor inverse = at::pow(theta, exponents).reciprocal_();
  const at::Tensor angles = at::outer(at::arange(cos.size(0), options), inverse);
  for (at::Tensor* table : {&cos, &sin}) {
    const at::Tensor values = table == &cos ? angles.cos() : angles.sin();
    table->narrow(1, 0, half).copy_(values);
    table->narrow(1, half, half).copy_(values);
  }
}

void rope_forward_inplace(at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  rotate(x, cos, sin, 1.0);
}

void rope_backward_inplace(at::Tensor& dx, const at::Tensor& cos, const at::Tensor& sin) {
  rotate(dx, cos, sin, -1.0);
}

namespace detail {

void rope_inplace_aten(at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign) {
  const int64_t half = x.size(2) / 2;
  const int64_t seq = cos.size(0);
  const at::Tensor by_position = x.unflatten(0, {-1, seq});  // [B, S, heads, d]
  at::Tensor low = by_position.narrow(3, 0, half);
  at::Tensor high = by_position.narrow(3, half, half);
  const at::Tensor c = cos.narrow(1, 0, half).unsqueeze(1);
  const at::Tensor s = sin.narrow(1, 0, half).unsqueeze(1) * sign;
  const at::Tensor turned_low = low * c - high * s;
  const at::Tensor turned_high = high * c + low * s;
  low.copy_(turned_low);
  high.copy_(turned_high);
}

}  // namespace detail
}  // namespace bagualu::ops
