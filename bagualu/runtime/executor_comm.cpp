// Communication of a micro-batch: issued by its kForward or kBackward, awaited by the ...End.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "bagualu/base/error.h"
#include "bagualu/runtime/executor_context.h"

namespace bagualu {
namespace {

bool is_exchange(OpKind kind) { return kind == OpKind::kDispatch || kind == OpKind::kCombine; }

// Storage that a communication sends, -1 if it only receives; and the other way round.
struct Ends {
  int source = -1;
  int target = -1;
};

Ends ends_of(const OpSpec& op, bool backward) {
  switch (op.kind) {
    case OpKind::kDispatch:
    case OpKind::kCombine:
      return backward ? Ends{op.bwd_reads[0], op.bwd_creates[0]} : Ends{op.reads[0], op.creates[0]};
    case OpKind::kStageRecv:
      return backward ? Ends{op.bwd_reads[0], -1} : Ends{-1, op.creates[0]};
    case OpKind::kStageSend:
      return backward ? Ends{-1, op.bwd_creates[0]} : Ends{op.reads[0], -1};
    default:
      throw InternalError("not a communication: " + op.name);
  }
}

}  // namespace

void MicrobatchContext::issue(const OpSpec& op, bool backward) {
  const Ends ends = ends_of(op, backward);
  at::Tensor target;
  if (ends.target >= 0) {
    const bool rows = is_exchange(op.kind);
    const LayerRouting* routing = rows ? &this->routing(op.layer) : nullptr;
    if (!rows) {
      target = make(ends.target, {tokens_, spec_.hidden}, dtype_);
    } else if (op.kind == OpKind::kDispatch) {
      const ops::WireLayout& layout = backward ? routing->send : routing->recv;
      target = make(ends.target, {layout.total_bytes()}, at::kByte);
    } else {
      const ops::WireLayout& layout = backward ? routing->recv : routing->send_plain;
      target = make(ends.target, {layout.total_bytes()}, at::kByte);
    }
  }
  const at::Tensor source = ends.source >= 0 ? get(ends.source) : at::Tensor();
  Issued issued;
  issued.op = static_cast<int>(&op - graph_->ops.data());
  issued.backward = backward;
  issued.pending = is_exchange(op.kind) ? issue_exchange(op, backward, source, target)
                                        : issue_transfer(op, backward, source, target);
  for (int storage : {ends.source, ends.target}) {
    if (storage < 0) continue;
    store_.lend(storage);
    issued.storages.push_back(storage);
  }
  issued_.push_back(std::move(issued));
}

PendingComm MicrobatchContext::issue_exchange(const OpSpec& op, bool backward,
                                              const at::Tensor& source, at::Tensor& target) {
  const LayerRouting& routing = this->routing(op.layer);
  const std::string label = text({backward ? ActionKind::kBackward : ActionKind::kForward,
                                  static_cast<int>(&op - graph_->ops.data())});
  if (op.kind == OpKind::kDispatch) {
    return backward
               ? shared_.ep.issue_all_to_all(source, routing.recv, target, routing.send, label)
               : shared_.ep.issue_all_to_all(source, routing.send, target, routing.recv, label);
  }
  return backward ? shared_.ep.issue_all_to_all(source, routing.send, target, routing.recv, label)
                  : shared_.ep.issue_all_to_all(source, routing.recv_plain, target,
                                                routing.send_plain, label);
}

// Tag of what goes over the edge between two stages: unique in a step. Steps follow each other on
// every rank, and equal tags match in the order of issue.
PendingComm MicrobatchContext::issue_transfer(const OpSpec& op, bool backward,
                                              const at::Tensor& source, at::Tensor& target) {
  const bool with_previous = op.kind == OpKind::kStageRecv;
  const int64_t peer = with_previous ? stage_.previous_rank : stage_.next_rank;
  BGL_CHECK(shared_.pp != nullptr && peer >= 0, op.name, stage_.stage, peer);
  const int64_t edge = stage_.stage - (with_previous ? 1 : 0);
  const int64_t tag = 2 * (input_.microbatch * stage_.stages + edge) + (backward ? 1 : 0);
  const std::string label = fmt::format(
      "{} of micro-batch {} {} stage {}", backward ? "gradient" : "activation", input_.microbatch,
      source.defined() ? "to" : "from", stage_.stage + (with_previous ? -1 : 1));
  return source.defined() ? shared_.pp->issue_send(source, peer, tag, label)
                          : shared_.pp->issue_recv(target, peer, tag, label);
}

void MicrobatchContext::end(int op, bool backward) {
  const auto found = std::find_if(issued_.begin(), issued_.end(), [&](const Issued& each) {
    return each.op == op && each.backward == backward;
  });
  BGL_CHECK(found != issued_.end(), graph_->ops[op].name, backward, "was not issued");
  found->pending.wait();
  last_comm_ = found->pending.times();
  for (int storage : found->storages) store_.take_back(storage);
  issued_.erase(found);
}

}  // namespace bagualu
