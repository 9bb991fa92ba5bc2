#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace bagualu::ops {

struct AdamwOptions {
  double lr = 0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0;  ///< decoupled; 0 for norms
};

/// One AdamW update of flat fp32 buffers, in place (ATen's fused kernel).
/// Shapes:  all [n] contiguous, views allowed; `step` counts from 1
/// Workspace: adamw_workspace_bytes.
void adamw_step(at::Tensor& param, const at::Tensor& grad, at::Tensor& exp_avg,
                at::Tensor& exp_avg_sq, int64_t step, const AdamwOptions& options);

/// Sum of squares of a flat fp32 tensor, added in double over fixed blocks: the same bits for any
/// number of threads. Workspace: squared_norm_workspace_bytes.
double squared_norm(const at::Tensor& flat);

/// Factor that brings a gradient of norm `norm` down to `max_norm`; 1 if it is below or no limit.
double clip_factor(double norm, double max_norm);

/// flat *= factor; nothing is done for factor 1.
void scale_inplace(at::Tensor& flat, double factor);

/// working = bf16(master), element by element.
void cast_working_copy(const at::Tensor& master, at::Tensor& working);

}  // namespace bagualu::ops
