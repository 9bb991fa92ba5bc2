#pragma once

#include <ATen/core/Tensor.h>

namespace bagualu::ops {

/// One piece of one expert: rows -> fc1_out -> act_out -> out. No temporaries.
/// Shapes:  rows, out [P, h]; probs fp32 [P]; w1 [2f, h] (gate rows, then up); w2 [h, f];
///          fc1_out [P, 2f]; act_out [P, f]
/// Requires: out may be rows (rows are read by the first product only). P = 0 is legal.
void experts_forward_piece(const at::Tensor& rows, const at::Tensor& probs, const at::Tensor& w1,
                           const at::Tensor& w2, at::Tensor& fc1_out, at::Tensor& act_out,
                           at::Tensor& out);

/// The parts of the above, for recomputing one of them alone.
void expert_fc1_piece(const at::Tensor& rows, const at::Tensor& w1, at::Tensor& fc1_out);
void expert_act_piece(const at::Tensor& fc1_out, const at::Tensor& probs, at::Tensor& act_out);

/// What one backward piece reads and writes.
struct ExpertGradients {
  at::Tensor d_act;    ///< [P, f] scratch; may be act_out
  at::Tensor d_fc1;    ///< [P, 2f] scratch; may be fc1_out
  at::Tensor d_rows;   ///< [P, h] written; may be dout or rows
  at::Tensor d_probs;  ///< fp32 [P] written; not probs
  at::Tensor dw1;      ///< fp32 [2f, h], added to
  at::Tensor dw2;      ///< fp32 [h, f], added to
};

/// Gradient of experts_forward_piece, in the order dw2, d_act, d_fc1, dw1, d_rows, which is what
/// makes the aliases above legal.
/// Workspace: experts_backward_piece_workspace_bytes (0 in fp32).
void experts_backward_piece(const at::Tensor& dout, const at::Tensor& rows, const at::Tensor& probs,
                            const at::Tensor& fc1_out, const at::Tensor& act_out,
                            const at::Tensor& w1, const at::Tensor& w2, ExpertGradients& grads);

/// The same in two parts, with the same bits: first the gradient of the piece's input. dw1 and dw2
/// are not touched (and may be undefined); dout and d_fc1 must be kept for the second part, so
/// d_fc1 and d_rows alias neither fc1_out nor dout if those are still needed.
void experts_input_grad_piece(const at::Tensor& dout, const at::Tensor& probs,
                              const at::Tensor& fc1_out, const at::Tensor& w1, const at::Tensor& w2,
                              ExpertGradients& grads);

/// Then, any time later, the weights': dw2 += dout^T act_out, dw1 += d_fc1^T rows.
/// Workspace: experts_backward_piece_workspace_bytes.
void experts_weight_grad_piece(const at::Tensor& dout, const at::Tensor& rows,
                               const at::Tensor& act_out, const at::Tensor& d_fc1, at::Tensor& dw1,
                               at::Tensor& dw2);

}  // namespace bagualu::ops
