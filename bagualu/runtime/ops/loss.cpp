#include "bagualu/runtime/ops/loss.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "bagualu/runtime/ops/dispatch.h"
#include "bagualu/runtime/ops/softmax.h"

namespace bagualu::ops {
namespace {

template <class T>
BGL_KERNEL void log_softmax_rows(const T* logits, int64_t width, float* log_probs, int64_t begin,
                                 int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T* row = logits + r * width;
    const float lse = simd::log_sum_exp(row, width);
    for (int64_t j = 0; j < width; j += simd::kLanes) {
      simd::store(log_probs + r * width + j, width - j, simd::load(row + j, width - j) - lse);
    }
  }
}

template <class T>
BGL_KERNEL void backward_rows(const float* log_probs, const int64_t* targets, float scale,
                              int64_t width, T* d_logits, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const float* row = log_probs + r * width;
    T* out = d_logits + r * width;
    const int64_t group = targets[r] / simd::kLanes * simd::kLanes;
    for (int64_t j = 0; j < width; j += simd::kLanes) {
      simd::Lanes probs = simd::exp(simd::load(row + j, width - j));
      if (j == group) probs[targets[r] - group] -= 1.0f;
      simd::store(out + j, width - j, probs * scale);
    }
  }
}

double picked_sum(const float* log_probs, const int64_t* targets, int64_t rows, int64_t width) {
  double total = 0;
  for (int64_t r = 0; r < rows; ++r) total += log_probs[r * width + targets[r]];
  return total;
}

void check_targets(const int64_t* targets, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) {
    if (targets[r] < 0 || targets[r] >= width) {
      throw InvalidInput("targets", fmt::format("token {}", r), fmt::format("{}", targets[r]),
                         fmt::format("0 to {}", width - 1));
    }
  }
}

}  // namespace

double loss_forward(const at::Tensor& logits, const at::Tensor& targets, at::Tensor& log_probs) {
  const int64_t rows = logits.size(0);
  const int64_t width = logits.size(1);
  check_rows(logits, rows, width);
  check_rows(log_probs, rows, width);
  BGL_CHECK(targets.numel() == rows && targets.is_contiguous(), targets.numel(), rows);
  if (!uses_loops(logits)) {
    at::_log_softmax_out(log_probs, logits.to(at::kFloat), 1, /*half_to_float=*/false);
    return -log_probs.gather(1, targets.unsqueeze(1)).sum(at::kDouble).item<double>();
  }
  const int64_t* wanted = targets.const_data_ptr<int64_t>();
  check_targets(wanted, rows, width);
  with_element(logits, [&]<class T>(T*) {
    at::parallel_for(0, rows, row_grain(2 * width), [&](int64_t begin, int64_t end) {
      log_softmax_rows<T>(data<T>(logits), width, data<float>(log_probs), begin, end);
    });
  });
  return -picked_sum(data<float>(log_probs), wanted, rows, width);
}

void loss_backward(const at::Tensor& log_probs, const at::Tensor& targets, double scale,
                   at::Tensor& d_logits) {
  const int64_t rows = log_probs.size(0);
  const int64_t width = log_probs.size(1);
  check_rows(log_probs, rows, width);
  check_rows(d_logits, rows, width);
  if (!uses_loops(log_probs)) {
    at::Tensor probs = log_probs.exp();
    probs.scatter_add_(1, targets.unsqueeze(1), at::full({rows, 1}, -1.0, probs.options()));
    d_logits.copy_(probs.mul_(scale));
    return;
  }
  with_element(d_logits, [&]<class T>(T*) {
    at::parallel_for(0, rows, row_grain(2 * width), [&](int64_t begin, int64_t end) {
      backward_rows<T>(data<float>(log_probs), targets.const_data_ptr<int64_t>(),
                       static_cast<float>(scale), width, data<T>(d_logits), begin, end);
    });
  });
}

}  // namespace bagualu::ops
