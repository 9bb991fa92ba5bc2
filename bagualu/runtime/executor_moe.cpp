#include <ATen/ATen.h>

#include <chrono>
#include <span>

#include "bagualu/base/error.h"
#include "bagualu/runtime/executor_context.h"
#include "bagualu/runtime/executor_sites.h"
#include "bagualu/runtime/ops/dropout.h"
#include "bagualu/runtime/ops/experts.h"
#include "bagualu/runtime/ops/linear.h"
#include "bagualu/runtime/ops/permute.h"
#include "bagualu/runtime/ops/router.h"

namespace bagualu {
namespace {

ops::RouterOptions router_options(const ModelSpec& spec) {
  return {spec.top_k, spec.norm_topk_prob, spec.aux_loss_coef, spec.z_loss_coef};
}

at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

class Stopwatch {
 public:
  // Adds the time since the last lap.
  void lap(int64_t& total_ns) {
    const auto now = std::chrono::steady_clock::now();
    total_ns += (now - last_) / std::chrono::nanoseconds(1);
    last_ = now;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace

void MicrobatchContext::forward_router(const OpSpec& op) {
  const int in_model = model_layer(op.layer);
  at::Tensor logits = make(op.creates[0], {tokens_, spec_.experts}, at::kFloat);
  at::Tensor ids = make(op.creates[1], {tokens_, spec_.top_k}, at::kShort);
  at::Tensor probs = make(op.creates[2], {tokens_, spec_.top_k}, at::kFloat);
  at::Tensor row_map = make(op.creates[3], {tokens_ * spec_.top_k}, at::kInt);
  const LayerWeights& weights = layer(op.layer);
  const RoutingOverride* forced = input_.routing;
  ops::router_logits(get(op.reads[0]), weights.router.weight, at::Tensor(), logits);
  if (forced != nullptr && !forced->spikes.empty() && forced->spikes[in_model]) {
    add_spike(*forced->spikes[in_model], spec_.top_k, shared_.ep.size(), logits);
  }
  const bool replay = forced != nullptr && !forced->tokens_per_expert.empty() &&
                      !forced->tokens_per_expert[in_model].empty();
  if (replay) {
    assign_recorded_routing(forced->tokens_per_expert[in_model], shared_.ep.size(),
                            shared_.ep.rank(), ids);
  }
  const ops::RouterLosses losses =
      ops::router_select(logits, weights.router_bias, router_options(spec_), replay, ids, probs);
  losses_.aux += losses.aux;
  losses_.z += losses.z;

  std::vector<int64_t> counts(spec_.experts);
  const auto assignments = static_cast<size_t>(tokens_ * spec_.top_k);
  ops::build_row_map(std::span<const int16_t>(ids.const_data_ptr<int16_t>(), assignments),
                     spec_.experts, std::span<int32_t>(row_map.data_ptr<int32_t>(), assignments),
                     counts);
  routing_[op.layer].emplace(shared_.ep.all_gather(counts), shared_.ep.size(), shared_.ep.rank(),
                             spec_.hidden * static_cast<int64_t>(at::elementSize(dtype_)),
                             options_.chunk_rows);
}

void MicrobatchContext::forward_dispatch_pack(const OpSpec& op) {
  const LayerRouting& routing = *routing_[op.layer];
  const at::Tensor normed = get(op.reads[0]), row_map = get(op.reads[1]), probs = get(op.reads[2]);
  if (shared_.ep.size() > 1) {
    at::Tensor wire = make(op.creates[0], {routing.send.total_bytes()}, at::kByte);
    ops::pack_rows(normed, probs, row_map, routing.send, wire);
    return;
  }
  // One rank: the order of sending is the order of the experts, so rows land where they are needed.
  at::Tensor rows = make(op.creates[0], {routing.load.rows, spec_.hidden}, dtype_);
  at::Tensor row_probs = make(op.creates[1], {routing.load.rows}, at::kFloat);
  at::Tensor row_bytes = as_bytes(rows), prob_bytes = as_bytes(row_probs);
  ops::pack_rows(normed, at::Tensor(), row_map, routing.send_plain, row_bytes);
  const ops::WireLayout prob_layout({routing.load.rows}, sizeof(float), false);
  ops::pack_rows(probs.view({-1, 1}), at::Tensor(), row_map, prob_layout, prob_bytes);
}

// The pieces' intermediates: views of the materialised storages, or of buffers of one piece that
// every piece reuses.
struct MicrobatchContext::PieceBuffers {
  PieceBuffers(const MicrobatchContext& context, const OpSpec& op, const LayerLoad& load,
               bool backward)
      : keeps_fc1(context.materialised(op.creates[0])),
        keeps_act(context.materialised(op.creates[1])) {
    const int64_t f = context.spec_.expert_ffn;
    if (!keeps_fc1) fc1 = context.scratch({load.piece_rows, 2 * f}, context.dtype_);
    if (!keeps_act) act = context.scratch({load.piece_rows, f}, context.dtype_);
    if (backward && keeps_fc1) fc1 = context.get(op.creates[0]);
    if (backward && keeps_act) act = context.get(op.creates[1]);
  }

  at::Tensor fc1_of(const ExpertPiece& piece) const {
    return fc1.narrow(0, keeps_fc1 ? piece.row_begin : 0, piece.rows);
  }
  at::Tensor act_of(const ExpertPiece& piece) const {
    return act.narrow(0, keeps_act ? piece.row_begin : 0, piece.rows);
  }

  bool keeps_fc1, keeps_act;
  at::Tensor fc1, act;
};

void MicrobatchContext::forward_experts(const OpSpec& op) {
  const LayerRouting& routing = *routing_[op.layer];
  const LayerWeights& weights = layer(op.layer);
  const int64_t rows = routing.load.rows, h = spec_.hidden, f = spec_.expert_ffn;
  const at::Tensor in = get(op.reads[0]), probs = get(op.reads[1]);
  at::Tensor kept_fc1, kept_act;
  if (materialised(op.creates[0])) kept_fc1 = make(op.creates[0], {rows, 2 * f}, dtype_);
  if (materialised(op.creates[1])) kept_act = make(op.creates[1], {rows, f}, dtype_);
  at::Tensor wire = make(op.creates[2], {routing.recv_plain.total_bytes()}, at::kByte);
  PieceBuffers buffers(*this, op, routing.load, false);
  if (kept_fc1.defined()) buffers.fc1 = kept_fc1;
  if (kept_act.defined()) buffers.act = kept_act;
  const bool exchange = shared_.ep.size() > 1;
  const at::Tensor out =
      exchange ? scratch({routing.load.piece_rows, h}, dtype_) : wire.view(dtype_).view({rows, h});
  Stopwatch watch;
  for (const ExpertPiece& piece : routing.pieces) {
    at::Tensor fc1 = buffers.fc1_of(piece), act = buffers.act_of(piece);
    at::Tensor piece_out = out.narrow(0, exchange ? 0 : piece.row_begin, piece.rows);
    ops::expert_fc1_piece(in.narrow(0, piece.row_begin, piece.rows),
                          weights.expert_fc1.weight.select(0, piece.expert), fc1);
    watch.lap(expert_times_.fc1_ns);
    ops::expert_act_piece(fc1, probs.narrow(0, piece.row_begin, piece.rows), act);
    watch.lap(expert_times_.act_ns);
    ops::linear_forward(act, weights.expert_fc2.weight.select(0, piece.expert), piece_out);
    if (exchange) {
      ops::scatter_piece(piece_out, at::Tensor(), routing.recv_plain, routing.received,
                         piece.expert,
                         piece.row_begin - routing.received.expert_begin(piece.expert), wire);
    }
    watch.lap(expert_times_.fc2_ns);
  }
}

void MicrobatchContext::backward_experts(const OpSpec& op, BackwardPart part) {
  const LayerRouting& routing = *routing_[op.layer];
  LayerWeights& weights = layer(op.layer);
  const bool whole = part == BackwardPart::kWhole;
  const int64_t rows_there = routing.load.rows, largest = routing.load.piece_rows;
  const int64_t h = spec_.hidden, f = spec_.expert_ffn;
  const at::Tensor in = get(op.bwd_saved[0]), probs = get(op.bwd_saved[1]);
  at::Tensor wire = get(op.bwd_reads[0]);
  const PieceBuffers buffers(*this, op, routing.load, true);
  const at::Tensor d_rows = scratch({largest, h}, dtype_);
  const at::Tensor d_act = scratch({largest, f}, dtype_);
  // What the weight gradient reads later stands in storages of all rows.
  const at::Tensor d_fc1 = whole ? scratch({largest, 2 * f}, dtype_)
                                 : make(op.wgrad_reads[0], {rows_there, 2 * f}, dtype_);
  const at::Tensor d_out = whole ? at::Tensor() : make(op.wgrad_reads[1], {rows_there, h}, dtype_);
  const at::Tensor d_probs = scratch({largest}, at::kFloat);
  for (const ExpertPiece& piece : routing.pieces) {
    const int64_t in_expert = piece.row_begin - routing.received.expert_begin(piece.expert);
    const at::Tensor rows = in.narrow(0, piece.row_begin, piece.rows);
    const at::Tensor row_probs = probs.narrow(0, piece.row_begin, piece.rows);
    const at::Tensor w1 = weights.expert_fc1.weight.select(0, piece.expert);
    const at::Tensor w2 = weights.expert_fc2.weight.select(0, piece.expert);
    at::Tensor fc1 = buffers.fc1_of(piece), act = buffers.act_of(piece);
    if (!buffers.keeps_fc1) ops::expert_fc1_piece(rows, w1, fc1);
    if (!buffers.keeps_act && whole) ops::expert_act_piece(fc1, row_probs, act);
    ops::ExpertGradients grads{d_act.narrow(0, 0, piece.rows),
                               d_fc1.narrow(0, whole ? 0 : piece.row_begin, piece.rows),
                               d_rows.narrow(0, 0, piece.rows),
                               d_probs.narrow(0, 0, piece.rows),
                               weights.expert_fc1.grad.select(0, piece.expert),
                               weights.expert_fc2.grad.select(0, piece.expert)};
    at::Tensor dout = whole ? grads.d_rows : d_out.narrow(0, piece.row_begin, piece.rows);
    // The wire's second column is filler here; d_probs takes it until it is overwritten.
    ops::gather_piece(wire, routing.recv, routing.received, piece.expert, in_expert, dout,
                      grads.d_probs);
    if (whole) {
      ops::experts_backward_piece(dout, rows, row_probs, fc1, act, w1, w2, grads);
    } else {
      ops::experts_input_grad_piece(dout, row_probs, fc1, w1, w2, grads);
    }
    ops::scatter_piece(grads.d_rows, grads.d_probs, routing.recv, routing.received, piece.expert,
                       in_expert, wire);
  }
}

void MicrobatchContext::forward_moe(const OpSpec& op) {
  switch (op.kind) {
    case OpKind::kRouter:
      return forward_router(op);
    case OpKind::kDispatchPack:
      return forward_dispatch_pack(op);
    case OpKind::kExperts:
      return forward_experts(op);
    default:
      break;
  }
  const LayerRouting& routing = *routing_[op.layer];
  switch (op.kind) {
    case OpKind::kDispatchUnpack: {
      at::Tensor rows = make(op.creates[0], {routing.load.rows, spec_.hidden}, dtype_);
      at::Tensor probs = make(op.creates[1], {routing.load.rows}, at::kFloat);
      ops::unpack_rows(get(op.reads[0]), routing.recv, routing.received, rows, probs);
      return;
    }
    case OpKind::kCombineUnpack: {
      at::Tensor out = make(op.creates[0], {tokens_, spec_.hidden}, dtype_);
      at::Tensor no_probs;
      ops::combine_rows(get(op.reads[0]), get(op.reads[1]), routing.send_plain, false, out,
                        no_probs);
      if (op.reads.size() > 3) out.add_(get(op.reads[3]));  // shared expert
      ops::dropout_forward_inplace(out, dropout(), dropout_seed(op.layer, kAfterMlp));
      out.add_(get(op.reads[2]));
      return;
    }
    default:
      throw InternalError("not a MoE operator: " + op.name);
  }
}

void MicrobatchContext::backward_moe(const OpSpec& op, BackwardPart part) {
  const LayerRouting& routing = *routing_[op.layer];
  LayerWeights& weights = layer(op.layer);
  switch (op.kind) {
    case OpKind::kRouter: {
      at::Tensor logits = get(op.bwd_saved[0]), d_normed = get(op.bwd_reads[1]);
      const at::Tensor d_probs = get(op.bwd_reads[0]), ids = get(op.bwd_saved[1]);
      if (part == BackwardPart::kInput) {
        ops::router_input_grad(d_probs, ids, weights.router.weight, router_options(spec_),
                               input_.router_loss_scale, logits, d_normed);
      } else {
        ops::router_backward(d_probs, ids, get(op.bwd_saved[3]), weights.router.weight,
                             router_options(spec_), input_.router_loss_scale, logits, d_normed,
                             weights.router.grad);
      }
      return;
    }
    case OpKind::kDispatchPack: {
      at::Tensor d_normed = make(op.bwd_creates[0], {tokens_, spec_.hidden}, dtype_);
      at::Tensor d_probs = make(op.bwd_creates[1], {tokens_, spec_.top_k}, at::kFloat);
      ops::combine_rows(get(op.bwd_reads[0]), get(op.bwd_saved[0]), routing.send, false, d_normed,
                        d_probs);
      return;
    }
    case OpKind::kExperts:
      return backward_experts(op, part);
    case OpKind::kCombineUnpack: {
      at::Tensor gradient = get(op.bwd_reads[0]);
      if (op.bwd_creates.size() > 1) {
        const at::Tensor d_hidden = gradient;
        gradient = make(op.bwd_creates[0], {tokens_, spec_.hidden}, dtype_);
        ops::dropout_backward(d_hidden, dropout(), dropout_seed(op.layer, kAfterMlp), gradient);
      }
      at::Tensor wire = make(op.bwd_creates.back(), {routing.send.total_bytes()}, at::kByte);
      ops::pack_rows(gradient, get(op.bwd_saved[1]), get(op.bwd_saved[0]), routing.send, wire);
      return;
    }
    default:
      throw InternalError("not a MoE operator: " + op.name);
  }
}

}  // namespace bagualu
