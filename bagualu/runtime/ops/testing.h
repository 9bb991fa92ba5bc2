#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "bagualu/model/layout.h"
#include "bagualu/runtime/budget_counter.h"
#include "bagualu/runtime/device_arena.h"

/// What the tests of this folder share.
namespace bagualu::ops::testing {

inline at::ScalarType scalar_type(Dtype dtype) {
  return dtype == Dtype::kFp32 ? at::kFloat : at::kBFloat16;
}

inline at::Tensor random(at::IntArrayRef sizes, Dtype dtype = Dtype::kFp32, double scale = 1.0) {
  return at::randn(sizes).mul_(scale).to(scalar_type(dtype));
}

inline at::Tensor leaf(const at::Tensor& t) {
  return t.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).set_requires_grad(true);
}

/// Largest difference over the largest magnitude of the expected values.
inline double relative_error(const at::Tensor& found, const at::Tensor& expected) {
  if (expected.numel() == 0) return found.numel() == 0 ? 0 : 1;
  const at::Tensor want = expected.detach().to(at::kDouble);
  const double largest = want.abs().max().item<double>();
  const double error = (found.detach().to(at::kDouble) - want).abs().max().item<double>();
  return largest == 0 ? error : error / largest;
}

inline double tolerance(Dtype dtype) { return dtype == Dtype::kFp32 ? 1e-5 : 3e-2; }

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) { return at::equal(a, b); }

/// Runs f with 1 and with 2 threads, restores the number.
template <class F>
void for_threads(F&& f) {
  const int before = at::get_num_threads();
  for (int threads : {1, 2}) {
    at::set_num_threads(threads);
    SCOPED_TRACE(::testing::Message() << threads << " threads");
    f(threads);
  }
  at::set_num_threads(before);
}

/// Peak bytes of torch's CPU allocator during f, above those at its beginning.
template <class F>
int64_t peak_workspace_bytes(F&& f) {
  DeviceArena& arena = DeviceArena::install(BudgetCounter::kNoBudget);
  const int64_t before = arena.live_bytes();
  arena.mark_peak();
  f();
  return arena.peak_bytes() - before;
}

}  // namespace bagualu::ops::testing
