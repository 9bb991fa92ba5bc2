#pragma once

#include <ATen/core/Tensor.h>

namespace bagualu::ops {

/// Log-softmax of every row and the summed cross entropy.
/// Shapes:  logits [T, V] of either dtype, contiguous; targets int64 [T]; log_probs fp32 [T, V]
/// Requires: log_probs may be logits (fp32).
/// Returns: -sum_t log_probs[t, targets[t]], added in token order (waits for the device)
/// Throws:  InvalidInput if a target is outside [0, V)
double loss_forward(const at::Tensor& logits, const at::Tensor& targets, at::Tensor& log_probs);

/// d_logits = (exp(log_probs) - onehot(targets)) * scale.
/// Shapes:  d_logits [T, V] of either dtype; may be log_probs (fp32)
void loss_backward(const at::Tensor& log_probs, const at::Tensor& targets, double scale,
                   at::Tensor& d_logits);

}  // namespace bagualu::ops
