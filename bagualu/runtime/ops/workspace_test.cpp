// The stated bytes of every operator's temporaries against torch's CPU allocator.
#include "bagualu/runtime/ops/workspace.h"

#include <vector>

#include "bagualu/runtime/ops/attention.h"
#include "bagualu/runtime/ops/dropout.h"
#include "bagualu/runtime/ops/embedding.h"
#include "bagualu/runtime/ops/experts.h"
#include "bagualu/runtime/ops/linear.h"
#include "bagualu/runtime/ops/loss.h"
#include "bagualu/runtime/ops/norm.h"
#include "bagualu/runtime/ops/optimizer.h"
#include "bagualu/runtime/ops/permute.h"
#include "bagualu/runtime/ops/rope.h"
#include "bagualu/runtime/ops/router.h"
#include "bagualu/runtime/ops/swiglu.h"
#include "bagualu/runtime/ops/testing.h"

namespace bagualu::ops {
namespace {

using testing::peak_workspace_bytes;
using testing::random;

constexpr int64_t kHidden = 96, kFfn = 80, kExperts = 8, kVocab = 256;

class Workspace : public ::testing::TestWithParam<Dtype> {
 protected:
  Workspace() { at::manual_seed(1); }

  // Shapes, threads: f(rows).
  template <class F>
  void sweep(F&& f) {
    testing::for_threads([&](int) {
      for (int64_t rows : {1, 5, 64, 129, 1024}) {
        SCOPED_TRACE(::testing::Message() << rows << " rows");
        f(rows);
      }
    });
  }
  at::Tensor draw(at::IntArrayRef sizes) { return random(sizes, dtype_, 0.3); }

  const Dtype dtype_ = GetParam();
  at::NoGradGuard no_grad_;
};
INSTANTIATE_TEST_SUITE_P(Dtypes, Workspace, ::testing::Values(Dtype::kFp32, Dtype::kBf16),
                         [](const auto& info) {
                           return info.param == Dtype::kFp32 ? "Fp32" : "Bf16";
                         });

TEST_P(Workspace, RowOperatorsAllocateNothing) {
  at::Tensor w = draw({kHidden}), dw = at::zeros({kHidden});
  at::Tensor table = draw({kVocab, kHidden}), dtable = at::zeros({kVocab, kHidden});
  sweep([&](int64_t rows) {
    at::Tensor x = draw({rows, kHidden}), y = draw({rows, kHidden}), rstd = at::empty({rows});
    EXPECT_EQ(0, peak_workspace_bytes([&] { rms_norm_forward(x, w, 1e-6, y, rstd); }));
    EXPECT_EQ(0, peak_workspace_bytes([&] { rms_norm_backward(y, x, w, rstd, y, false, dw); }));
    at::Tensor cos = at::rand({rows, 16}), sin = at::rand({rows, 16});
    at::Tensor heads = draw({rows, 6, 16});
    EXPECT_EQ(0, peak_workspace_bytes([&] { rope_forward_inplace(heads, cos, sin); }));
    EXPECT_EQ(0, peak_workspace_bytes([&] { dropout_forward_inplace(y, 0.1, 5); }));
    EXPECT_EQ(0, peak_workspace_bytes([&] { dropout_forward_inplace(y, 0.0, 5); }));
    const at::Tensor ids = at::randint(0, kVocab, {rows}, at::kLong);
    EXPECT_EQ(0, peak_workspace_bytes([&] { embedding_forward(ids, table, y); }));
    EXPECT_EQ(0, peak_workspace_bytes([&] { embedding_backward(ids, y, dtable); }));
    at::Tensor logits = draw({rows, kVocab}), log_probs = at::empty({rows, kVocab});
    EXPECT_EQ(0, peak_workspace_bytes([&] { loss_forward(logits, ids, log_probs); }));
    EXPECT_EQ(0, peak_workspace_bytes([&] { loss_backward(log_probs, ids, 0.1, logits); }));
    EXPECT_EQ(0, peak_workspace_bytes([&] { y.add_(x); }));
  });
}

TEST_P(Workspace, Linear) {
  const at::Tensor w = draw({kFfn, kHidden});
  at::Tensor dw = at::zeros({kFfn, kHidden});
  sweep([&](int64_t rows) {
    at::Tensor x = draw({rows, kHidden}), y = draw({rows, kFfn});
    EXPECT_EQ(0, peak_workspace_bytes([&] { linear_forward(x, w, y); }));
    EXPECT_EQ(0, peak_workspace_bytes([&] { linear_backward_input(y, w, x, true); }));
    EXPECT_EQ(0, peak_workspace_bytes([&] { linear_backward_input(y, w, x, false); }));
    EXPECT_EQ(linear_backward_weight_workspace_bytes(kFfn, kHidden, dtype_),
              peak_workspace_bytes([&] { linear_backward_weight(y, x, dw); }));
  });
}

TEST_P(Workspace, ExpertPieces) {
  const at::Tensor w1 = draw({2 * kFfn, kHidden}), w2 = draw({kHidden, kFfn});
  // Weight gradients are views into one flat buffer.
  at::Tensor flat = at::zeros({3 * kFfn * kHidden + 8});
  const at::Tensor dw1 = flat.narrow(0, 8, 2 * kFfn * kHidden).view({2 * kFfn, kHidden});
  const at::Tensor dw2 =
      flat.narrow(0, 8 + 2 * kFfn * kHidden, kFfn * kHidden).view({kHidden, kFfn});
  sweep([&](int64_t rows) {
    at::Tensor x = draw({rows, kHidden}), probs = at::rand({rows});
    at::Tensor fc1 = draw({rows, 2 * kFfn}), act = draw({rows, kFfn}), out = draw({rows, kHidden});
    ExpertGradients grads{act, fc1, out, at::empty({rows}), dw1, dw2};
    EXPECT_EQ(
        0, peak_workspace_bytes([&] { experts_forward_piece(x, probs, w1, w2, fc1, act, out); }));
    EXPECT_EQ(experts_backward_piece_workspace_bytes(kHidden, kFfn, dtype_),
              peak_workspace_bytes(
                  [&] { experts_backward_piece(out, x, probs, fc1, act, w1, w2, grads); }));
    ExpertGradients parts{
        at::empty_like(act), at::empty_like(fc1), at::empty_like(x), at::empty({rows}), {}, {}};
    EXPECT_EQ(
        0, peak_workspace_bytes([&] { experts_input_grad_piece(out, probs, fc1, w1, w2, parts); }));
    EXPECT_EQ(experts_backward_piece_workspace_bytes(kHidden, kFfn, dtype_),
              peak_workspace_bytes([&] {
                experts_weight_grad_piece(out, x, act, parts.d_fc1, grads.dw1, grads.dw2);
              }));
  });
}

TEST_P(Workspace, Router) {
  const at::Tensor w = draw({kExperts, kHidden}), bias = at::zeros({kExperts});
  at::Tensor dw = at::zeros({kExperts, kHidden});
  const RouterOptions options{2, true, 0.01, 0.001};
  sweep([&](int64_t rows) {
    at::Tensor x = draw({rows, kHidden}), logits = at::empty({rows, kExperts});
    at::Tensor ids = at::empty({rows, 2}, at::kInt), probs = at::empty({rows, 2});
    EXPECT_EQ(router_forward_workspace_bytes(rows, kExperts, dtype_), peak_workspace_bytes([&] {
                router_forward(x, w, bias, bias, options, false, logits, ids, probs);
              }));
    EXPECT_EQ(router_backward_workspace_bytes(rows, kHidden, kExperts, dtype_),
              peak_workspace_bytes(
                  [&] { router_backward(probs, ids, x, w, options, 1.0, logits, x, dw); }));
    EXPECT_EQ(router_input_grad_workspace_bytes(rows, kExperts, dtype_), peak_workspace_bytes([&] {
                router_input_grad(probs, ids, w, options, 1.0, logits, x);
              }));
    EXPECT_EQ(router_backward_workspace_bytes(rows, kHidden, kExperts, dtype_),
              peak_workspace_bytes([&] { router_weight_grad(logits, x, dw); }));
  });
}

TEST_P(Workspace, PermutationsAllocateNothing) {
  sweep([&](int64_t rows) {
    at::Tensor x = draw({rows, kHidden}), probs = at::rand({rows, 2});
    at::Tensor map = at::randperm(rows * 2, at::kInt);
    const std::vector<int64_t> counts = {rows * 2 - 1, 1};
    const ReceivedRows received(counts, 1, 2);
    const WireLayout layout({rows * 2}, kHidden * x.element_size(), true);
    at::Tensor wire = at::zeros({layout.total_bytes()}, at::kByte);
    at::Tensor unpacked = draw({rows * 2, kHidden}), unpacked_probs = at::rand({rows * 2});
    EXPECT_EQ(0, peak_workspace_bytes([&] {
                pack_rows(x, probs, map, layout, wire);
                unpack_rows(wire, layout, received, unpacked, unpacked_probs);
                combine_rows(wire, map, layout, true, x, probs);
              }));
  });
}

// Peak = result + max(scratch, dq + dk + dv), and the results' storages are exactly their elements.
TEST_P(Workspace, AttentionIsMeasuredAndRepeats) {
  const HeadLayout layout{2, 128, 4, 2, 32};
  const at::Tensor qkv = draw({256, layout.width()}), dout = draw({256, 128});
  testing::for_threads([&](int) {
    const at::Tensor q = query_rows(qkv, layout), k = key_rows(qkv, layout);
    const at::Tensor v = value_rows(qkv, layout);
    AttentionResult result;
    const int64_t forward =
        peak_workspace_bytes([&] { result = core_attn_forward(q, k, v, layout); });
    const int64_t results = result.out.nbytes() + result.lse.nbytes();
    EXPECT_GT(forward, results);
    const auto backward = [&] {
      return peak_workspace_bytes(
          [&] { core_attn_backward(dout, q, k, v, result.out, result.lse, layout); });
    };
    const int64_t first = backward();
    EXPECT_EQ(first, backward());
    EXPECT_GE(first, 2 * static_cast<int64_t>(qkv.nbytes()));
    RecordProperty("attention_forward_bytes", std::to_string(forward - results));
    RecordProperty("attention_backward_bytes", std::to_string(first));
  });
}

TEST(OptimizerWorkspace, IsWhatIsStated) {
  at::NoGradGuard no_grad;
  testing::for_threads([&](int) {
    for (int64_t n : {7, 16384, 100001}) {
      at::Tensor p = at::randn({n}), g = at::randn({n}), m = at::zeros({n}), v = at::zeros({n});
      at::Tensor working = at::empty({n}, at::kBFloat16);
      EXPECT_EQ(adamw_workspace_bytes(), peak_workspace_bytes([&] {
                  adamw_step(p, g, m, v, 1, {1e-3, 0.9, 0.95, 1e-8, 0.1});
                }));
      EXPECT_EQ(squared_norm_workspace_bytes(n), peak_workspace_bytes([&] { squared_norm(g); }));
      EXPECT_EQ(0, peak_workspace_bytes([&] { scale_inplace(g, 0.5); }));
      EXPECT_EQ(0, peak_workspace_bytes([&] { cast_working_copy(p, working); }));
    }
  });
}

}  // namespace
}  // namespace bagualu::ops
