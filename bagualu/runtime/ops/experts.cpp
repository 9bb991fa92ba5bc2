#include "bagualu/runtime/ops/experts.h"

#include "bagualu/runtime/ops/dispatch.h"
#include "bagualu/runtime/ops/linear.h"
#include "bagualu/runtime/ops/swiglu.h"

namespace bagualu::ops {

void expert_fc1_piece(const at::Tensor& rows, const at::Tensor& w1, at::Tensor& fc1_out) {
  if (rows.size(0) > 0) linear_forward(rows, w1, fc1_out);
}

void expert_act_piece(const at::Tensor& fc1_out, const at::Tensor& probs, at::Tensor& act_out) {
  swiglu_forward(fc1_out, probs, act_out);
}

void experts_forward_piece(const at::Tensor& rows, const at::Tensor& probs, const at::Tensor& w1,
                           const at::Tensor& w2, at::Tensor& fc1_out, at::Tensor& act_out,
                           at::Tensor& out) {
  if (rows.size(0) == 0) return;
  expert_fc1_piece(rows, w1, fc1_out);
  expert_act_piece(fc1_out, probs, act_out);
  linear_forward(act_out, w2, out);
}

void experts_backward_piece(const at::Tensor& dout, const at::Tensor& rows, const at::Tensor& probs,
                            const at::Tensor& fc1_out, const at::Tensor& act_out,
                            const at::Tensor& w1, const at::Tensor& w2, ExpertGradients& grads) {
  if (rows.size(0) == 0) return;
  // Each step reads for the last time what a later one may overwrite.
  linear_backward_weight(dout, act_out, grads.dw2);
  linear_backward_input(dout, w2, grads.d_act, /*accumulate=*/false);
  swiglu_backward(grads.d_act, fc1_out, probs, grads.d_fc1, grads.d_probs);
  linear_backward_weight(grads.d_fc1, rows, grads.dw1);
  linear_backward_input(grads.d_fc1, w1, grads.d_rows, /*accumulate=*/false);
}

void experts_input_grad_piece(const at::Tensor& dout, const at::Tensor& probs,
                              const at::Tensor& fc1_out, const at::Tensor& w1, const at::Tensor& w2,
                              ExpertGradients& grads) {
  if (dout.size(0) == 0) return;
  linear_backward_input(dout, w2, grads.d_act, /*accumulate=*/false);
  swiglu_backward(grads.d_act, fc1_out, probs, grads.d_fc1, grads.d_probs);
  linear_backward_input(grads.d_fc1, w1, grads.d_rows, /*accumulate=*/false);
}

void experts_weight_grad_piece(const at::Tensor& dout, const at::Tensor& rows,
                               const at::Tensor& act_out, const at::Tensor& d_fc1, at::Tensor& dw1,
                               at::Tensor& dw2) {
  if (dout.size(0) == 0) return;
  linear_backward_weight(dout, act_out, dw2);
  linear_backward_weight(d_fc1, rows, dw1);
}

}  // namespace bagualu::ops
