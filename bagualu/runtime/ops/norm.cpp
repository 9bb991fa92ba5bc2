#include "bagualu/runtime/ops/norm.h"

#include <ATen/ATen.h>

#include "bagualu/runtime/ops/dispatch.h"

namespace bagualu::ops {
namespace {

using simd::kLanes;
using simd::Lanes;

// Rows of a [T, h] or [T, heads, d] view: row r = (token r / heads, head r % heads).
struct RowView {
  char* base;
  int64_t heads;
  int64_t token_stride_bytes;
  int64_t head_stride_bytes;

  explicit RowView(const at::Tensor& t)
      : base(static_cast<char*>(t.data_ptr())),
        heads(t.dim() == 3 ? t.size(1) : 1),
        token_stride_bytes(t.stride(0) * t.element_size()),
        head_stride_bytes(t.dim() == 3 ? t.stride(1) * t.element_size() : 0) {
    BGL_CHECK(t.dim() == 2 || t.dim() == 3, t.dim());
    BGL_CHECK(t.stride(-1) == 1 || t.size(-1) == 1, t.stride(-1));
  }

  template <class T>
  T* row(int64_t r) const {
    if (heads == 1) return reinterpret_cast<T*>(base + r * token_stride_bytes);
    return reinterpret_cast<T*>(base + r / heads * token_stride_bytes +
                                r % heads * head_stride_bytes);
  }
};

int64_t row_count(const at::Tensor& x) { return x.dim() == 3 ? x.size(0) * x.size(1) : x.size(0); }

template <class T>
BGL_KERNEL void forward_rows(const RowView& x, const T* w, float eps, int64_t width,
                             const RowView& out, float* rstd, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T* row = x.row<T>(r);
    Lanes squares = {};
    for (int64_t j = 0; j < width; j += kLanes) {
      const Lanes v = simd::load(row + j, width - j);
      squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(simd::sum(squares) / static_cast<float>(width) + eps);
    rstd[r] = scale;
    T* target = out.row<T>(r);
    for (int64_t j = 0; j < width; j += kLanes) {
      // transformers rounds the normalised value to the activation type before it scales it.
      const Lanes normed = simd::round_to(row, simd::load(row + j, width - j) * scale);
      simd::store(target + j, width - j, normed * simd::load(w + j, width - j));
    }
  }
}

template <class T>
BGL_KERNEL void backward_rows(const RowView& dy, const RowView& x, const T* w, const float* rstd,
                              int64_t width, const RowView& dx, bool accumulate, int64_t begin,
                              int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T* dy_row = dy.row<T>(r);
    const T* x_row = x.row<T>(r);
    Lanes products = {};
    for (int64_t j = 0; j < width; j += kLanes) {
      const Lanes scaled = simd::load(dy_row + j, width - j) * simd::load(w + j, width - j);
      products += scaled * simd::load(x_row + j, width - j);
    }
    const float scale = rstd[r];
    const float pull = simd::sum(products) / static_cast<float>(width) * scale * scale;
    T* target = dx.row<T>(r);
    for (int64_t j = 0; j < width; j += kLanes) {
      const Lanes scaled = simd::load(dy_row + j, width - j) * simd::load(w + j, width - j);
      Lanes gradient = (scaled - simd::load(x_row + j, width - j) * pull) * scale;
      if (accumulate) gradient += simd::load(target + j, width - j);
      simd::store(target + j, width - j, gradient);
    }
  }
}

// Sums in blocks of rows, for accuracy; the order is the same however the columns are split.
template <class T>
BGL_KERNEL void weight_columns(const RowView& dy, const RowView& x, const float* rstd, int64_t rows,
                               float* dw, int64_t begin, int64_t end) {
  constexpr int64_t kBlockRows = 64;
  for (int64_t block = 0; block < rows; block += kBlockRows) {
    const int64_t last = std::min(rows, block + kBlockRows);
    for (int64_t j = begin; j < end; j += kLanes) {
      const int64_t n = end - j;
      Lanes total = {};
      for (int64_t r = block; r < last; ++r) {
        const Lanes normed = simd::round_to(x.row<T>(r), simd::load(x.row<T>(r) + j, n) * rstd[r]);
        total += simd::load(dy.row<T>(r) + j, n) * normed;
      }
      simd::store(dw + j, n, simd::load(dw + j, n) + total);
    }
  }
}

}  // namespace

void rms_norm_forward(const at::Tensor& x, const at::Tensor& w, double eps, at::Tensor& out,
                      at::Tensor& rstd) {
  const int64_t width = x.size(-1);
  BGL_CHECK(rstd.numel() == row_count(x) && w.numel() == width, rstd.numel(), w.numel(), width);
  if (!uses_loops(x)) return detail::rms_norm_forward_aten(x, w, eps, out, rstd);
  with_element(x, [&]<class T>(T*) {
    const RowView from(x), to(out);
    at::parallel_for(0, row_count(x), row_grain(width), [&](int64_t begin, int64_t end) {
      forward_rows<T>(from, data<T>(w), static_cast<float>(eps), width, to, data<float>(rstd),
                      begin, end);
    });
  });
}

void rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w,
                       const at::Tensor& rstd, at::Tensor& dx, bool accumulate, at::Tensor& dw) {
  const int64_t width = x.size(-1);
  BGL_CHECK(rstd.numel() == row_count(x) && dw.numel() == width, rstd.numel(), dw.numel(), width);
  if (!uses_loops(x)) {
    return detail::rms_norm_backward_aten(dy, x, w, rstd, dx, accumulate, dw);
  }
  with_element(x, [&]<class T>(T*) {
    const RowView gradient(dy), from(x), to(dx);
    const int64_t rows = row_count(x);
    // First: dx may overwrite dy.
    parallel_columns(rows, width, [&](int64_t begin, int64_t end) {
      weight_columns<T>(gradient, from, data<float>(rstd), rows, data<float>(dw), begin, end);
    });
    at::parallel_for(0, rows, row_grain(width), [&](int64_t begin, int64_t end) {
      backward_rows<T>(gradient, from, data<T>(w), data<float>(rstd), width, to, accumulate, begin,
                       end);
    });
  });
}

namespace detail {

void rms_norm_forward_aten(const at::Tensor& x, const at::Tensor& w, double eps, at::Tensor& out,
                           at::Tensor& rstd) {
  at::Tensor wide = x.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  at::Tensor mean = wide.square().mean(-1);
  rstd.copy_(mean.add_(eps).rsqrt_());
  wide.mul_(rstd.unsqueeze(-1));
  out.copy_(wide);
  out.mul_(w);
}

void rms_norm_backward_aten(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w,
                            const at::Tensor& rstd, at::Tensor& dx, bool accumulate,
                            at::Tensor& dw) {
  const int64_t width = x.size(-1);
  const at::Tensor scale = rstd.unsqueeze(-1);
  const at::Tensor normed = x.to(at::kFloat).mul(scale);
  const at::Tensor wide = dy.to(at::kFloat);
  dw.add_((wide * normed.to(x.scalar_type()).to(at::kFloat)).reshape({-1, width}).sum(0));
  const at::Tensor scaled = wide * w.to(at::kFloat);
  const at::Tensor pull = (scaled * normed).mean(-1, /*keepdim=*/true);
  const at::Tensor gradient = (scaled - normed * pull).mul_(scale);
  if (accumulate) {
    dx.add_(gradient);
  } else {
    dx.copy_(gradient);
  }
}

}  // namespace detail
}  // namespace bagualu::ops
