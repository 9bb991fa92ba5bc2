#include "bagualu/runtime/ops/swiglu.h"

#include <ATen/ATen.h>

#include "bagualu/runtime/ops/dispatch.h"

namespace bagualu::ops {
namespace {

using simd::kLanes;
using simd::Lanes;

BGL_INLINE Lanes sigmoid(Lanes x) { return 1.0f / (1.0f + simd::exp(-x)); }

template <class T>
BGL_KERNEL void forward_rows(const T* fc1, const float* probs, int64_t width, T* out, int64_t begin,
                             int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T* gates = fc1 + r * 2 * width;
    const float prob = probs == nullptr ? 1.0f : probs[r];
    for (int64_t j = 0; j < width; j += kLanes) {
      const int64_t n = width - j;
      const Lanes gate = simd::load(gates + j, n);
      const Lanes up = simd::load(gates + width + j, n);
      simd::store(out + r * width + j, n, gate * sigmoid(gate) * up * prob);
    }
  }
}

template <class T>
BGL_KERNEL void backward_rows(const T* dout, const T* fc1, const float* probs, int64_t width,
                              T* dfc1, float* dprobs, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T* gates = fc1 + r * 2 * width;
    T* target = dfc1 + r * 2 * width;
    const float prob = probs == nullptr ? 1.0f : probs[r];
    Lanes prob_gradient = {};
    for (int64_t j = 0; j < width; j += kLanes) {
      const int64_t n = width - j;
      const Lanes gate = simd::load(gates + j, n);
      const Lanes up = simd::load(gates + width + j, n);
      const Lanes incoming = simd::load(dout + r * width + j, n);
      const Lanes open = sigmoid(gate);
      const Lanes silu = gate * open;
      prob_gradient += silu * up * incoming;
      const Lanes weighted = incoming * prob;
      simd::store(target + j, n, weighted * up * (open + silu * (1.0f - open)));
      simd::store(target + width + j, n, weighted * silu);
    }
    if (dprobs != nullptr) dprobs[r] = simd::sum(prob_gradient);
  }
}

int64_t checked_width(const at::Tensor& fc1, const at::Tensor& probs, const at::Tensor& out) {
  const int64_t width = fc1.size(1) / 2;
  check_rows(fc1, fc1.size(0), 2 * width);
  check_rows(out, fc1.size(0), width);
  BGL_CHECK(!probs.defined() || (probs.numel() == fc1.size(0) && probs.is_contiguous() &&
                                 probs.scalar_type() == at::kFloat),
            fc1.size(0));
  return width;
}

float* optional_floats(const at::Tensor& t) { return t.defined() ? data<float>(t) : nullptr; }

}  // namespace

void swiglu_forward(const at::Tensor& fc1, const at::Tensor& probs, at::Tensor& out) {
  const int64_t width = checked_width(fc1, probs, out);
  if (!uses_loops(fc1)) return detail::swiglu_forward_aten(fc1, probs, out);
  with_element(fc1, [&]<class T>(T*) {
    at::parallel_for(0, fc1.size(0), row_grain(4 * width), [&](int64_t begin, int64_t end) {
      forward_rows<T>(data<T>(fc1), optional_floats(probs), width, data<T>(out), begin, end);
    });
  });
}

void swiglu_backward(const at::Tensor& dout, const at::Tensor& fc1, const at::Tensor& probs,
                     at::Tensor& dfc1, at::Tensor& dprobs) {
  const int64_t width = checked_width(fc1, probs, dout);
  check_rows(dfc1, fc1.size(0), 2 * width);
  if (!uses_loops(fc1)) return detail::swiglu_backward_aten(dout, fc1, probs, dfc1, dprobs);
  with_element(fc1, [&]<class T>(T*) {
    at::parallel_for(0, fc1.size(0), row_grain(4 * width), [&](int64_t begin, int64_t end) {
      backward_rows<T>(data<T>(dout), data<T>(fc1), optional_floats(probs), width, data<T>(dfc1),
                       optional_floats(dprobs), begin, end);
    });
  });
}

namespace detail {

void swiglu_forward_aten(const at::Tensor& fc1, const at::Tensor& probs, at::Tensor& out) {
  const int64_t width = fc1.size(1) / 2;
  at::silu_out(out, fc1.narrow(1, 0, width));
  out.mul_(fc1.narrow(1, width, width));
  if (probs.defined()) out.mul_(probs.unsqueeze(1));
}

void swiglu_backward_aten(const at::Tensor& dout, const at::Tensor& fc1, const at::Tensor& probs,
                          at::Tensor& dfc1, at::Tensor& dprobs) {
  const int64_t width = fc1.size(1) / 2;
  const at::Tensor gate = fc1.narrow(1, 0, width).to(at::kFloat);
  const at::Tensor up = fc1.narrow(1, width, width).to(at::kFloat);
  const at::Tensor open = gate.sigmoid();
  const at::Tensor silu = gate * open;
  at::Tensor incoming = dout.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  if (dprobs.defined()) dprobs.copy_((silu * up).mul_(incoming).sum(1));
  if (probs.defined()) incoming.mul_(probs.unsqueeze(1));
  const at::Tensor slope = (1 - open).mul_(silu).add_(open);
  // `up` may be a view of dfc1's second half, so that half is written last.
  dfc1.narrow(1, 0, width).copy_((incoming * up).mul_(slope));
  dfc1.narrow(1, width, width).copy_(incoming.mul_(silu));
}

}  // namespace detail
}  // namespace bagualu::ops
