// Every operator against torch's autograd of the plain composition.
#include "bagualu/base/error.h"
#include "bagualu/runtime/ops/attention.h"
#include "bagualu/runtime/ops/embedding.h"
#include "bagualu/runtime/ops/experts.h"
#include "bagualu/runtime/ops/linear.h"
#include "bagualu/runtime/ops/loss.h"
#include "bagualu/runtime/ops/norm.h"
#include "bagualu/runtime/ops/rope.h"
#include "bagualu/runtime/ops/swiglu.h"
#include "bagualu/runtime/ops/testing.h"

namespace bagualu::ops {
namespace {

using testing::leaf;
using testing::random;
using testing::relative_error;
using testing::tolerance;

class OpGradients : public ::testing::TestWithParam<Dtype> {
 protected:
  OpGradients() { at::manual_seed(7); }

  void expect_close(const at::Tensor& found, const at::Tensor& expected, const char* what) {
    ASSERT_EQ(found.numel(), expected.numel()) << what;
    EXPECT_LE(relative_error(found, expected), tolerance(dtype_)) << what;
  }
  at::Tensor draw(at::IntArrayRef sizes, double scale = 1.0) {
    return random(sizes, dtype_, scale);
  }
  at::Tensor like(at::IntArrayRef sizes) {
    return at::full(sizes, 99.0, at::dtype(testing::scalar_type(dtype_)));
  }

  const Dtype dtype_ = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Dtypes, OpGradients, ::testing::Values(Dtype::kFp32, Dtype::kBf16),
                         [](const auto& info) {
                           return info.param == Dtype::kFp32 ? "Fp32" : "Bf16";
                         });

at::Tensor plain_norm(const at::Tensor& x, const at::Tensor& w, double eps) {
  return x * (x.square().mean(-1, true) + eps).rsqrt() * w;
}

TEST_P(OpGradients, RmsNormOfRows) {
  for (int64_t width : {5, 64, 131}) {
    const at::Tensor x = draw({77, width}), w = draw({width}), dy = draw({77, width});
    const at::Tensor xl = leaf(x), wl = leaf(w);
    const at::Tensor expected = plain_norm(xl, wl, 1e-6);
    expected.backward(dy.to(at::kFloat));
    at::Tensor out = like({77, width}), rstd = at::empty({77});
    rms_norm_forward(x, w, 1e-6, out, rstd);
    expect_close(out, expected, "out");
    at::Tensor dx = at::ones_like(x), dw = at::ones({width});
    rms_norm_backward(dy, x, w, rstd, dx, /*accumulate=*/true, dw);
    expect_close(dx, xl.grad() + 1, "dx");
    expect_close(dw, wl.grad() + 1, "dw");
    at::Tensor aten_out = like({77, width}), aten_rstd = at::empty({77});
    detail::rms_norm_forward_aten(x, w, 1e-6, aten_out, aten_rstd);
    expect_close(aten_out, expected, "aten out");
    at::Tensor aten_dx = at::zeros_like(x), aten_dw = at::zeros({width});
    detail::rms_norm_backward_aten(dy, x, w, rstd, aten_dx, /*accumulate=*/false, aten_dw);
    expect_close(aten_dx, xl.grad(), "aten dx");
    expect_close(aten_dw, wl.grad(), "aten dw");
  }
}

// Query and key norms work on heads inside wider rows; the gradient replaces the incoming one.
TEST_P(OpGradients, RmsNormOfStridedHeadsInPlace) {
  const HeadLayout layout{1, 9, 4, 2, 24};
  const at::Tensor qkv = draw({9, layout.width()}), w = draw({24});
  at::Tensor dqkv = draw({9, layout.width()});
  const at::Tensor x = key_rows(qkv, layout);
  at::Tensor dx = key_rows(dqkv, layout);
  const at::Tensor dy = dx.clone(), untouched = query_rows(dqkv, layout).clone();
  const at::Tensor xl = leaf(x), wl = leaf(w);
  const at::Tensor expected = plain_norm(xl, wl, 1e-5);
  expected.backward(dy.to(at::kFloat));
  at::Tensor out = like({9, 2, 24}), rstd = at::empty({9, 2}), dw = at::zeros({24});
  rms_norm_forward(x, w, 1e-5, out, rstd);
  expect_close(out, expected, "out");
  rms_norm_backward(dx, x, w, rstd, dx, /*accumulate=*/false, dw);
  expect_close(dx, xl.grad(), "dx");
  expect_close(dw, wl.grad(), "dw");
  EXPECT_TRUE(testing::same_bits(query_rows(dqkv, layout), untouched));
}

TEST_P(OpGradients, Linear) {
  const at::Tensor x = draw({37, 24}), w = draw({40, 24}), dy = draw({37, 40});
  const at::Tensor xl = leaf(x), wl = leaf(w);
  const at::Tensor expected = at::linear(xl, wl);
  expected.backward(dy.to(at::kFloat));
  at::Tensor out = like({37, 40}), dx = like({37, 24}), dw = at::ones({40, 24});
  linear_forward(x, w, out);
  expect_close(out, expected, "out");
  linear_backward_input(dy, w, dx, /*accumulate=*/false);
  expect_close(dx, xl.grad(), "dx");
  linear_backward_input(dy, w, dx, /*accumulate=*/true);
  expect_close(dx, xl.grad() * 2, "dx added");
  linear_backward_weight(dy, x, dw);
  expect_close(dw, wl.grad() + 1, "dw");
}

TEST_P(OpGradients, RopeTurnsAndTurnsBack) {
  for (int64_t d : {8, 32, 20}) {
    const int64_t batch = 2, seq = 7, heads = 3;
    at::Tensor cos = at::empty({seq, d}), sin = at::empty({seq, d});
    rope_tables(10000.0, cos, sin);
    EXPECT_NEAR(cos[3][d / 2].item<double>(), std::cos(3.0), 1e-6);
    const at::Tensor x = draw({batch * seq, heads, d}), dy = draw({batch * seq, heads, d});
    const at::Tensor xl = leaf(x);
    const at::Tensor rotated = at::cat({-xl.narrow(2, d / 2, d / 2), xl.narrow(2, 0, d / 2)}, 2);
    const at::Tensor c = cos.repeat({batch, 1}).unsqueeze(1);
    const at::Tensor s = sin.repeat({batch, 1}).unsqueeze(1);
    const at::Tensor expected = xl * c + rotated * s;
    expected.backward(dy.to(at::kFloat));
    at::Tensor out = x.clone(), aten = x.clone(), dx = dy.clone();
    rope_forward_inplace(out, cos, sin);
    expect_close(out, expected, "out");
    detail::rope_inplace_aten(aten, cos, sin, 1.0);
    expect_close(aten, expected, "aten");
    rope_backward_inplace(dx, cos, sin);
    expect_close(dx, xl.grad(), "dx");
  }
}

TEST_P(OpGradients, CausalGroupedAttention) {
  const HeadLayout layout{2, 40, 4, 2, 16};
  const int64_t tokens = layout.batch * layout.seq;
  const at::Tensor qkv = draw({tokens, layout.width()}), dout = draw({tokens, 64});
  const at::Tensor ql = leaf(qkv);
  const auto heads_of = [&](const at::Tensor& rows) {
    return rows.unflatten(0, {layout.batch, layout.seq}).transpose(1, 2);
  };
  const at::Tensor q = heads_of(query_rows(ql, layout));
  const at::Tensor k = heads_of(key_rows(ql, layout)).repeat_interleave(2, 1);
  const at::Tensor v = heads_of(value_rows(ql, layout)).repeat_interleave(2, 1);
  const at::Tensor mask = at::full({40, 40}, -INFINITY).triu(1);
  const at::Tensor probs = at::softmax(q.matmul(k.transpose(2, 3)) / 4.0 + mask, -1);
  const at::Tensor expected = probs.matmul(v).transpose(1, 2).reshape({tokens, 64});
  expected.backward(dout.to(at::kFloat));
  const AttentionResult result = core_attn_forward(query_rows(qkv, layout), key_rows(qkv, layout),
                                                   value_rows(qkv, layout), layout);
  expect_close(result.out, expected, "out");
  EXPECT_TRUE(result.out.is_contiguous());
  EXPECT_EQ(static_cast<int64_t>(result.out.storage().nbytes()),
            tokens * 64 * result.out.element_size());
  EXPECT_TRUE(result.lse.is_contiguous());
  EXPECT_EQ(static_cast<int64_t>(result.lse.storage().nbytes()), tokens * 4 * 4);
  const at::Tensor dqkv =
      core_attn_backward(dout, query_rows(qkv, layout), key_rows(qkv, layout),
                         value_rows(qkv, layout), result.out, result.lse, layout);
  expect_close(dqkv, ql.grad(), "dqkv");
}

TEST_P(OpGradients, EmbeddingWithRepeatedTokens) {
  const at::Tensor ids = at::randint(0, 11, {50}, at::kLong), w = draw({11, 20});
  const at::Tensor dx = draw({50, 20}), wl = leaf(w);
  const at::Tensor expected = at::embedding(wl, ids);
  expected.backward(dx.to(at::kFloat));
  at::Tensor out = like({50, 20}), dw = at::ones({11, 20});
  embedding_forward(ids, w, out);
  expect_close(out, expected, "out");
  embedding_backward(ids, dx, dw);
  expect_close(dw, wl.grad() + 1, "dw");
}

TEST(Embedding, RefusesTokensOutsideTheVocabulary) {
  at::Tensor ids = at::zeros({4}, at::kLong), w = at::zeros({3, 8}), out = at::zeros({4, 8});
  ids[2] = 3;
  EXPECT_THROW(embedding_forward(ids, w, out), InvalidInput);
}

TEST_P(OpGradients, SwigluWithAndWithoutProbs) {
  for (bool weighted : {false, true}) {
    const at::Tensor fc1 = draw({33, 2 * 27}, 2.0), dout = draw({33, 27});
    const at::Tensor probs = weighted ? at::rand({33}) : at::Tensor();
    const at::Tensor fl = leaf(fc1), pl = weighted ? leaf(probs) : at::Tensor();
    at::Tensor expected = at::silu(fl.narrow(1, 0, 27)) * fl.narrow(1, 27, 27);
    if (weighted) expected = expected * pl.unsqueeze(1);
    expected.backward(dout.to(at::kFloat));
    at::Tensor out = like({33, 27}), aten_out = like({33, 27});
    swiglu_forward(fc1, probs, out);
    detail::swiglu_forward_aten(fc1, probs, aten_out);
    expect_close(out, expected, "out");
    expect_close(aten_out, expected, "aten out");
    at::Tensor dfc1 = fc1.clone(), dprobs = weighted ? at::empty({33}) : at::Tensor();
    at::Tensor aten_dfc1 = fc1.clone(), aten_dprobs = weighted ? at::empty({33}) : at::Tensor();
    swiglu_backward(dout, dfc1, probs, dfc1, dprobs);  // over its own input
    detail::swiglu_backward_aten(dout, aten_dfc1, probs, aten_dfc1, aten_dprobs);
    expect_close(dfc1, fl.grad(), "dfc1");
    expect_close(aten_dfc1, fl.grad(), "aten dfc1");
    if (!weighted) continue;
    expect_close(dprobs, pl.grad(), "dprobs");
    expect_close(aten_dprobs, pl.grad(), "aten dprobs");
  }
}

TEST_P(OpGradients, ExpertPieceWithEveryAllowedAlias) {
  const int64_t p = 21, h = 24, f = 20;
  const at::Tensor rows = draw({p, h}), w1 = draw({2 * f, h}, 0.2), w2 = draw({h, f}, 0.2);
  const at::Tensor probs = at::rand({p}), dout = draw({p, h});
  const at::Tensor rl = leaf(rows), w1l = leaf(w1), w2l = leaf(w2), pl = leaf(probs);
  const at::Tensor fc1 = at::linear(rl, w1l);
  const at::Tensor act = at::silu(fc1.narrow(1, 0, f)) * fc1.narrow(1, f, f) * pl.unsqueeze(1);
  const at::Tensor expected = at::linear(act, w2l);
  expected.backward(dout.to(at::kFloat));
  for (bool aliased : {false, true}) {
    at::Tensor fc1_out = like({p, 2 * f}), act_out = like({p, f}), out = like({p, h});
    experts_forward_piece(rows, probs, w1, w2, fc1_out, act_out, out);
    expect_close(out, expected, "out");
    at::Tensor incoming = dout.clone();
    ExpertGradients grads{aliased ? act_out : like({p, f}),
                          aliased ? fc1_out : like({p, 2 * f}),
                          aliased ? incoming : like({p, h}),
                          at::empty({p}),
                          at::ones({2 * f, h}),
                          at::ones({h, f})};
    experts_backward_piece(incoming, rows, probs, fc1_out, act_out, w1, w2, grads);
    expect_close(grads.d_rows, rl.grad(), "d_rows");
    expect_close(grads.d_probs, pl.grad(), "d_probs");
    expect_close(grads.dw1, w1l.grad() + 1, "dw1");
    expect_close(grads.dw2, w2l.grad() + 1, "dw2");
  }
  at::Tensor fc1_out = like({p, 2 * f}), act_out = like({p, f}), in_place = rows.clone();
  experts_forward_piece(in_place, probs, w1, w2, fc1_out, act_out, in_place);
  expect_close(in_place, expected, "out over rows");
}

TEST_P(OpGradients, CrossEntropy) {
  for (int64_t vocab : {7, 256}) {
    const at::Tensor logits = draw({45, vocab}, 3.0);
    const at::Tensor targets = at::randint(0, vocab, {45}, at::kLong), ll = leaf(logits);
    const at::Tensor expected = at::cross_entropy_loss(ll, targets, {}, at::Reduction::Sum);
    (expected * 0.25).backward();
    at::Tensor log_probs = dtype_ == Dtype::kFp32 ? logits : at::empty({45, vocab});
    const double loss = loss_forward(logits, targets, log_probs);
    EXPECT_NEAR(loss / expected.item<double>(), 1.0, tolerance(dtype_));
    at::Tensor d_logits = dtype_ == Dtype::kFp32 ? log_probs : like({45, vocab});
    loss_backward(log_probs, targets, 0.25, d_logits);
    expect_close(d_logits, ll.grad(), "d_logits");
  }
}

TEST(Loss, RefusesTargetsOutsideTheVocabulary) {
  at::Tensor logits = at::zeros({2, 4}), targets = at::full({2}, -1, at::kLong);
  EXPECT_THROW(loss_forward(logits, targets, logits), InvalidInput);
}

}  // namespace
}  // namespace bagualu::ops
