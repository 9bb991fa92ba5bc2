// The graph's workspace formulas against the operators' own statements.
#include <gtest/gtest.h>

#include "bagualu/graph/native_moe.h"
#include "bagualu/graph/test_models.h"
#include "bagualu/runtime/ops/workspace.h"

namespace bagualu {
namespace {

using ops::storage_bytes;

struct Case {
  ModelSpec spec;
  NativeGraphOptions options;
  LayerLoad load;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const ModelSpec& base : {small_moe_spec(), rich_moe_spec()}) {
    for (const int64_t scale : {1, 3}) {
      ModelSpec spec = base;
      spec.hidden = 16 * scale;
      spec.expert_ffn = 16 * (scale + 1);
      spec.vocab = 50 * scale + 1;
      spec.experts = 4 * scale;
      for (const int64_t seq : {1, 7, 64, 65, 200}) {
        for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
          for (const int64_t ep : {1, 4}) {
            for (const LayerLoad load : {LayerLoad{0, 0}, LayerLoad{1, 1}, LayerLoad{531, 77}}) {
              all.push_back({spec, {2, seq, dtype, ep, 1}, load});
            }
          }
        }
      }
    }
  }
  return all;
}

// What the operator (workspace.h) and the executor around it (native_workspace.h) allocate.
int64_t expected_forward(const OpSpec& op, const Case& c) {
  const int64_t tokens = c.options.micro_batch_size * c.options.seq;
  const int64_t elem = ops::element_bytes(c.options.dtype);
  switch (op.kind) {
    case OpKind::kRouter:
      return ops::router_forward_workspace_bytes(tokens, c.spec.experts, c.options.dtype);
    case OpKind::kExperts:
      return c.options.ep_size > 1 ? storage_bytes(c.load.piece_rows * c.spec.hidden * elem) : 0;
    case OpKind::kLmHead:
      return c.options.dtype == Dtype::kBf16 ? storage_bytes(tokens * c.spec.vocab * elem) : 0;
    default:
      return 0;
  }
}

int64_t expected_backward(const OpSpec& op, const Case& c) {
  const ModelSpec& s = c.spec;
  const Dtype dtype = c.options.dtype;
  const int64_t tokens = c.options.micro_batch_size * c.options.seq;
  const int64_t elem = ops::element_bytes(dtype);
  const int64_t masked = s.dropout > 0 ? storage_bytes(tokens * s.hidden * elem) : 0;
  const int64_t p = c.load.piece_rows;
  const auto weight = [&](int64_t out, int64_t in) {
    return ops::linear_backward_weight_workspace_bytes(out, in, dtype);
  };
  switch (op.kind) {
    case OpKind::kQkv:
      return weight(s.qkv_width(), s.hidden);
    case OpKind::kAttnProj:
      return masked + weight(s.hidden, s.q_width());
    case OpKind::kRouter:
      return ops::router_backward_workspace_bytes(tokens, s.hidden, s.experts, dtype);
    case OpKind::kExperts:
      return storage_bytes(p * s.hidden * elem) + storage_bytes(p * s.expert_ffn * elem) +
             storage_bytes(p * 2 * s.expert_ffn * elem) + storage_bytes(p * 4) +
             ops::experts_backward_piece_workspace_bytes(s.hidden, s.expert_ffn, dtype);
    case OpKind::kSharedFc1:
      return weight(2 * s.shared_ffn, s.hidden);
    case OpKind::kSharedFc2:
      return weight(s.hidden, s.shared_ffn);
    case OpKind::kMlpFc1:
      return weight(2 * s.dense_ffn, s.hidden);
    case OpKind::kMlpFc2:
      return masked + weight(s.hidden, s.dense_ffn);
    case OpKind::kLmHead:
      return dtype == Dtype::kBf16
                 ? storage_bytes(tokens * s.vocab * elem) + weight(s.vocab, s.hidden)
                 : 0;
    default:
      return 0;
  }
}

// The weight gradient alone, and what is left of the backward without it.
int64_t expected_weight_gradient(const OpSpec& op, const Case& c) {
  const ModelSpec& s = c.spec;
  const Dtype dtype = c.options.dtype;
  const int64_t tokens = c.options.micro_batch_size * c.options.seq;
  const auto weight = [&](int64_t out, int64_t in) {
    return ops::linear_backward_weight_workspace_bytes(out, in, dtype);
  };
  switch (op.kind) {
    case OpKind::kQkv:
      return weight(s.qkv_width(), s.hidden);
    case OpKind::kAttnProj:
      return weight(s.hidden, s.q_width());
    case OpKind::kRouter:
      return ops::router_backward_workspace_bytes(tokens, s.hidden, s.experts, dtype);
    case OpKind::kExperts:
      return ops::experts_backward_piece_workspace_bytes(s.hidden, s.expert_ffn, dtype);
    case OpKind::kSharedFc1:
      return weight(2 * s.shared_ffn, s.hidden);
    case OpKind::kSharedFc2:
      return weight(s.hidden, s.shared_ffn);
    case OpKind::kMlpFc1:
      return weight(2 * s.dense_ffn, s.hidden);
    case OpKind::kMlpFc2:
      return weight(s.hidden, s.dense_ffn);
    default:
      return -1;
  }
}

int64_t expected_input_gradient(const OpSpec& op, const Case& c) {
  const int64_t elem = ops::element_bytes(c.options.dtype);
  const int64_t tokens = c.options.micro_batch_size * c.options.seq;
  const int64_t p = c.load.piece_rows;
  switch (op.kind) {
    case OpKind::kRouter:
      return ops::router_input_grad_workspace_bytes(tokens, c.spec.experts, c.options.dtype);
    case OpKind::kExperts:  // the gradients of fc1's output and of the rows are storages
      return storage_bytes(p * c.spec.hidden * elem) + storage_bytes(p * c.spec.expert_ffn * elem) +
             storage_bytes(p * 4);
    default:
      return 0;
  }
}

TEST(GraphWorkspace, OfSplitBackwardsAgreesWithTheOperators) {
  int compared = 0;
  for (Case c : cases()) {
    c.options.split_weight_grads = true;
    const Graph graph = build_native_graph(c.spec, c.options);
    for (const OpSpec& op : graph.ops) {
      if (!op.has_wgrad) continue;
      EXPECT_EQ(op.wgrad_workspace.eval(graph.tokens, c.load), expected_weight_gradient(op, c))
          << op.name;
      EXPECT_EQ(op.input_grad_workspace.eval(graph.tokens, c.load), expected_input_gradient(op, c))
          << op.name;
      ++compared;
    }
  }
  EXPECT_GT(compared, 1000);
}

TEST(GraphWorkspace, AgreesWithTheOperators) {
  int compared = 0;
  for (const Case& c : cases()) {
    const Graph graph = build_native_graph(c.spec, c.options);
    for (const OpSpec& op : graph.ops) {
      if (op.kind == OpKind::kCoreAttn) continue;  // ops::kMeasured
      EXPECT_EQ(op.fwd_workspace.eval(graph.tokens, c.load), expected_forward(op, c)) << op.name;
      if (!op.has_backward) continue;
      EXPECT_EQ(op.bwd_workspace.eval(graph.tokens, c.load), expected_backward(op, c)) << op.name;
      ++compared;
    }
  }
  EXPECT_GT(compared, 1000);
}

}  // namespace
}  // namespace bagualu
