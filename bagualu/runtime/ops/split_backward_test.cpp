// A backward in two parts has the bits of the whole one: input gradient, and weight gradient later.
#include <vector>

#include "bagualu/runtime/ops/experts.h"
#include "bagualu/runtime/ops/router.h"
#include "bagualu/runtime/ops/testing.h"

namespace bagualu::ops {
namespace {

using testing::random;
using testing::same_bits;

class SplitBackward : public ::testing::TestWithParam<Dtype> {
 protected:
  SplitBackward() { at::manual_seed(5); }
  at::Tensor draw(at::IntArrayRef sizes) { return random(sizes, dtype_, 0.3); }

  const Dtype dtype_ = GetParam();
};
INSTANTIATE_TEST_SUITE_P(Dtypes, SplitBackward, ::testing::Values(Dtype::kFp32, Dtype::kBf16),
                         [](const auto& info) {
                           return info.param == Dtype::kFp32 ? "Fp32" : "Bf16";
                         });

struct Weights {
  at::Tensor w1, w2, dw1, dw2;
};

// The rows of one expert in pieces. Whole: every piece through the same scratch, the rows' gradient
// in the place of the output's. Split: both gradients kept for all rows, the weights' at the end.
TEST_P(SplitBackward, OfExpertPiecesHasTheSameBits) {
  struct Shape {
    int64_t hidden, ffn;
    std::vector<int64_t> pieces;
  };
  const std::vector<Shape> shapes = {
      {32, 48, {64, 64, 17}}, {96, 16, {1}}, {64, 80, {33, 0, 2}}, {128, 64, {256, 256, 256, 5}}};
  for (const Shape& shape : shapes) {
    const int64_t h = shape.hidden, f = shape.ffn;
    int64_t rows = 0, largest = 0;
    for (const int64_t p : shape.pieces) {
      rows += p;
      largest = std::max(largest, p);
    }
    const at::Tensor x = draw({rows, h}), dout = draw({rows, h}), probs = at::rand({rows});
    const at::Tensor w1 = draw({2 * f, h}), w2 = draw({h, f});
    at::Tensor fc1 = draw({rows, 2 * f}), act = draw({rows, f}), out = draw({rows, h});
    Weights whole{w1, w2, at::randn({2 * f, h}), at::randn({h, f})};
    Weights split{w1, w2, whole.dw1.clone(), whole.dw2.clone()};
    const at::Tensor start = whole.dw1.clone();
    at::Tensor d_act = draw({largest, f}), d_fc1 = draw({largest, 2 * f}), d_rows = draw({rows, h});
    at::Tensor d_probs = at::empty({rows});
    at::Tensor kept_fc1 = draw({rows, 2 * f}), split_rows = draw({largest, h});
    at::Tensor split_probs = at::empty({rows});
    int64_t begin = 0;
    for (const int64_t p : shape.pieces) {
      const auto cut = [&](const at::Tensor& t) { return t.narrow(0, begin, p); };
      at::Tensor fc1_piece = cut(fc1), act_piece = cut(act), out_piece = cut(out);
      experts_forward_piece(cut(x), cut(probs), w1, w2, fc1_piece, act_piece, out_piece);
      cut(d_rows).copy_(cut(dout));
      ExpertGradients grads{d_act.narrow(0, 0, p),
                            d_fc1.narrow(0, 0, p),
                            cut(d_rows),
                            cut(d_probs),
                            whole.dw1,
                            whole.dw2};
      experts_backward_piece(grads.d_rows, cut(x), cut(probs), fc1_piece, act_piece, w1, w2, grads);
      ExpertGradients parts{d_act.narrow(0, 0, p),
                            cut(kept_fc1),
                            split_rows.narrow(0, 0, p),
                            cut(split_probs),
                            {},
                            {}};
      experts_input_grad_piece(cut(dout), cut(probs), fc1_piece, w1, w2, parts);
      EXPECT_TRUE(same_bits(parts.d_rows, grads.d_rows)) << p << " rows";
      begin += p;
    }
    begin = 0;
    for (const int64_t p : shape.pieces) {
      const auto cut = [&](const at::Tensor& t) { return t.narrow(0, begin, p); };
      experts_weight_grad_piece(cut(dout), cut(x), cut(act), cut(kept_fc1), split.dw1, split.dw2);
      begin += p;
    }
    EXPECT_TRUE(same_bits(split_probs, d_probs));
    EXPECT_TRUE(same_bits(split.dw1, whole.dw1));
    EXPECT_TRUE(same_bits(split.dw2, whole.dw2));
    EXPECT_FALSE(same_bits(whole.dw1, start));
  }
}

TEST_P(SplitBackward, OfTheRouterHasTheSameBits) {
  for (const int64_t tokens : {1, 5, 64, 129, 1000}) {
    for (const int64_t experts : {4, 8, 64}) {
      const int64_t h = 48;
      const RouterOptions options{2, true, 0.01, 0.001};
      const at::Tensor x = draw({tokens, h}), w = draw({experts, h});
      at::Tensor logits = at::empty({tokens, experts});
      at::Tensor ids = at::empty({tokens, 2}, at::kShort), probs = at::empty({tokens, 2});
      router_forward(x, w, {}, {}, options, false, logits, ids, probs);
      const at::Tensor d_probs = at::randn({tokens, 2});
      at::Tensor dx = draw({tokens, h}), dw = at::randn({experts, h});
      at::Tensor split_dx = dx.clone(), split_dw = dw.clone(), split_logits = logits.clone();
      router_backward(d_probs, ids, x, w, options, 0.5, logits, dx, dw);
      router_input_grad(d_probs, ids, w, options, 0.5, split_logits, split_dx);
      router_weight_grad(split_logits, x, split_dw);
      EXPECT_TRUE(same_bits(split_logits, logits));
      EXPECT_TRUE(same_bits(split_dx, dx));
      EXPECT_TRUE(same_bits(split_dw, dw));
    }
  }
}

}  // namespace
}  // namespace bagualu::ops
