#include "bagualu/runtime/ops/optimizer.h"

#include <ATen/ATen.h>

#include "bagualu/runtime/ops/dispatch.h"
#include "bagualu/runtime/ops/workspace.h"

namespace bagualu::ops {
namespace {

typedef double DoubleLanes __attribute__((vector_size(32)));
typedef float HalfOfLanes __attribute__((vector_size(16)));

// Halves of four: GCC takes a conversion to 64-byte vectors apart element by element.
BGL_KERNEL double block_squares(const float* values, int64_t count) {
  DoubleLanes low_total = {};
  DoubleLanes high_total = {};
  for (int64_t i = 0; i < count; i += simd::kLanes) {
    const simd::Lanes v = simd::load(values + i, count - i);
    const HalfOfLanes low_half = __builtin_shufflevector(v, v, 0, 1, 2, 3);
    const HalfOfLanes high_half = __builtin_shufflevector(v, v, 4, 5, 6, 7);
    const DoubleLanes low = __builtin_convertvector(low_half, DoubleLanes);
    const DoubleLanes high = __builtin_convertvector(high_half, DoubleLanes);
    low_total += low * low;
    high_total += high * high;
  }
  const DoubleLanes total = low_total + high_total;
  return (total[0] + total[2]) + (total[1] + total[3]);
}

BGL_KERNEL void cast_range(const float* from, simd::Bf16* to, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += simd::kLanes) {
    simd::store(to + i, end - i, simd::load(from + i, end - i));
  }
}

// ATen's mul_ by a number allocates a tensor for the number.
BGL_KERNEL void scale_range(float* values, float factor, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += simd::kLanes) {
    simd::store(values + i, end - i, simd::load(values + i, end - i) * factor);
  }
}

}  // namespace

void adamw_step(at::Tensor& param, const at::Tensor& grad, at::Tensor& exp_avg,
                at::Tensor& exp_avg_sq, int64_t step, const AdamwOptions& options) {
  BGL_CHECK(step >= 1, step);
  if (param.numel() == 0) return;
  const at::Tensor count = at::full({}, static_cast<double>(step), param.options());
  at::_fused_adamw_({param}, {grad}, {exp_avg}, {exp_avg_sq}, /*max_exp_avg_sqs=*/{}, {count},
                    options.lr, options.beta1, options.beta2, options.weight_decay, options.eps,
                    /*amsgrad=*/false, /*maximize=*/false);
}

double squared_norm(const at::Tensor& flat) {
  BGL_CHECK(flat.is_contiguous() && flat.scalar_type() == at::kFloat, flat.numel());
  const int64_t count = flat.numel();
  if (count == 0) return 0;
  if (!uses_loops(flat)) {
    const double norm =
        at::linalg_vector_norm(flat, 2, at::OptionalIntArrayRef(), false, at::kDouble)
            .item<double>();
    return norm * norm;
  }
  const int64_t blocks = (count + kNormBlockElements - 1) / kNormBlockElements;
  const at::Tensor partials = at::empty({blocks}, flat.options().dtype(at::kDouble));
  double* partial = partials.data_ptr<double>();
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * kNormBlockElements;
      partial[b] =
          block_squares(data<float>(flat) + first, std::min(kNormBlockElements, count - first));
    }
  });
  double total = 0;
  for (int64_t b = 0; b < blocks; ++b) total += partial[b];
  return total;
}

double clip_factor(double norm, double max_norm) {
  // The same small constant as torch.nn.utils.clip_grad_norm_.
  if (max_norm <= 0 || norm <= max_norm) return 1.0;
  return max_norm / (norm + 1e-6);
}

void scale_inplace(at::Tensor& flat, double factor) {
  if (factor == 1.0) return;
  BGL_CHECK(flat.is_contiguous() && flat.scalar_type() == at::kFloat, flat.numel());
  if (!uses_loops(flat)) {
    flat.mul_(factor);
    return;
  }
  at::parallel_for(0, flat.numel(), 16384, [&](int64_t begin, int64_t end) {
    scale_range(data<float>(flat), static_cast<float>(factor), begin, end);
  });
}

void cast_working_copy(const at::Tensor& master, at::Tensor& working) {
  BGL_CHECK(master.numel() == working.numel() && master.is_contiguous() && working.is_contiguous(),
            master.numel(), working.numel());
  if (!uses_loops(master)) {
    working.copy_(master);
    return;
  }
  at::parallel_for(0, master.numel(), 16384, [&](int64_t begin, int64_t end) {
    cast_range(data<float>(master), data<simd::Bf16>(working), begin, end);
  });
}

}  // namespace bagualu::ops
