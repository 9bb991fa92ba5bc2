#include "bagualu/runtime/ops/dropout.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include "bagualu/runtime/ops/dispatch.h"

namespace bagualu::ops {
namespace {

// SplitMix64's finaliser over (seed, index): one draw per element, in any order.
// Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
inline uint64_t draw(uint64_t seed, uint64_t index) {
  uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

struct Mask {
  uint64_t seed;
  uint32_t dropped_below;  // of 2^32
  float kept_scale;

  Mask(double p, uint64_t seed)
      : seed(seed),
        dropped_below(static_cast<uint32_t>(p * 4294967296.0)),
        kept_scale(static_cast<float>(1.0 / (1.0 - p))) {}
};

template <class T>
BGL_KERNEL void mask_range(const T* in, T* out, const Mask& mask, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += simd::kLanes) {
    const int64_t n = std::min(simd::kLanes, end - i);
    float factors[simd::kLanes] = {};
    for (int64_t lane = 0; lane < n; ++lane) {
      const auto bits = static_cast<uint32_t>(draw(mask.seed, i + lane) >> 32);
      factors[lane] = bits < mask.dropped_below ? 0.0f : mask.kept_scale;
    }
    simd::store(out + i, n, simd::load(in + i, n) * simd::load_full(factors));
  }
}

}  // namespace

void dropout_backward(const at::Tensor& dy, double p, uint64_t seed, at::Tensor& out) {
  BGL_CHECK(p >= 0 && p < 1, p);
  BGL_CHECK(dy.is_contiguous() && out.is_contiguous() && dy.numel() == out.numel(), dy.numel(),
            out.numel());
  if (p == 0) {
    if (!out.is_same(dy) && out.data_ptr() != dy.data_ptr()) out.copy_(dy);
    return;
  }
  if (!uses_loops(dy)) {
    at::Generator generator =
        at::globalContext().defaultGenerator(dy.device()).clone();  // leaves the default alone
    generator.set_current_seed(seed);
    at::Tensor kept = at::empty(dy.sizes(), dy.options());
    kept.bernoulli_(1 - p, generator).mul_(1 / (1 - p));
    at::mul_out(out, dy, kept);
    return;
  }
  const Mask mask(p, seed);
  with_element(dy, [&]<class T>(T*) {
    at::parallel_for(0, dy.numel(), 8192, [&](int64_t begin, int64_t end) {
      mask_range<T>(data<T>(dy), data<T>(out), mask, begin, end);
    });
  });
}

void dropout_forward_inplace(at::Tensor& y, double p, uint64_t seed) {
  if (p == 0) return;
  dropout_backward(y, p, seed, y);
}

}  // namespace bagualu::ops
