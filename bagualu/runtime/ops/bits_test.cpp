// Note [Bits of a row] in simd.h, tested: a row's result is the same alone, inside a larger buffer,
// at another offset, and with another number of threads.
#include <functional>
#include <vector>

#include "bagualu/runtime/ops/dropout.h"
#include "bagualu/runtime/ops/embedding.h"
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

using testing::random;
using testing::same_bits;

constexpr int64_t kRows = 80, kWidth = 45;

class RowBits : public ::testing::TestWithParam<Dtype> {
 protected:
  RowBits() { at::manual_seed(21); }

  // `op` maps rows of `inputs` to tensors with one row per input row.
  using Op = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
  void expect_rows_alone(const std::vector<at::Tensor>& inputs, const Op& op) {
    at::set_num_threads(1);
    const std::vector<at::Tensor> whole = op(inputs);
    testing::for_threads([&](int) {
      for (int64_t p = 1; p <= 33; ++p) {
        const int64_t first = 3 + p % 5;
        std::vector<at::Tensor> part;
        for (const at::Tensor& t : inputs) part.push_back(t.narrow(0, first, p).clone());
        const std::vector<at::Tensor> alone = op(part);
        for (size_t i = 0; i < whole.size(); ++i) {
          EXPECT_TRUE(same_bits(alone[i], whole[i].narrow(0, first, p))) << i << " of " << p;
        }
      }
      const std::vector<at::Tensor> again = op(inputs);
      for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(same_bits(again[i], whole[i])) << i;
    });
  }
  at::Tensor draw(at::IntArrayRef sizes) { return random(sizes, dtype_); }

  const Dtype dtype_ = GetParam();
};
INSTANTIATE_TEST_SUITE_P(Dtypes, RowBits, ::testing::Values(Dtype::kFp32, Dtype::kBf16),
                         [](const auto& info) {
                           return info.param == Dtype::kFp32 ? "Fp32" : "Bf16";
                         });

TEST_P(RowBits, Norm) {
  const at::Tensor w = draw({kWidth});
  expect_rows_alone({draw({kRows, kWidth}), draw({kRows, kWidth})}, [&](const auto& in) {
    at::Tensor out = at::empty_like(in[0]), rstd = at::empty({in[0].size(0)});
    at::Tensor dx = at::ones_like(in[0]), dw = at::zeros({kWidth});
    rms_norm_forward(in[0], w, 1e-6, out, rstd);
    rms_norm_backward(in[1], in[0], w, rstd, dx, true, dw);
    return std::vector<at::Tensor>{out, rstd, dx};
  });
}

TEST_P(RowBits, Swiglu) {
  expect_rows_alone({draw({kRows, 2 * kWidth}), draw({kRows, kWidth}), at::rand({kRows})},
                    [&](const auto& in) {
                      at::Tensor out = at::empty_like(in[1]), dfc1 = at::empty_like(in[0]);
                      at::Tensor dprobs = at::empty_like(in[2]);
                      swiglu_forward(in[0], in[2], out);
                      swiglu_backward(in[1], in[0], in[2], dfc1, dprobs);
                      return std::vector<at::Tensor>{out, dfc1, dprobs};
                    });
}

TEST_P(RowBits, CrossEntropy) {
  expect_rows_alone({draw({kRows, kWidth}), at::randint(0, kWidth, {kRows}, at::kLong)},
                    [&](const auto& in) {
                      at::Tensor log_probs = at::empty(in[0].sizes());
                      at::Tensor d_logits = at::empty_like(in[0]);
                      loss_forward(in[0], in[1], log_probs);
                      loss_backward(log_probs, in[1], 0.3, d_logits);
                      return std::vector<at::Tensor>{log_probs, d_logits};
                    });
}

TEST_P(RowBits, RouterChoice) {
  expect_rows_alone({at::randn({kRows, 13}), at::randn({kRows, 2})}, [&](const auto& in) {
    const RouterOptions options{2, true, 0, 0};
    at::Tensor ids = at::empty({in[0].size(0), 2}, at::kInt), probs = at::empty({in[0].size(0), 2});
    at::Tensor d_logits = in[0].clone();
    router_select(in[0], {}, options, false, ids, probs);
    const at::Tensor x = at::zeros({in[0].size(0), 4}), w = at::zeros({13, 4});
    at::Tensor dx = at::zeros_like(x), dw = at::zeros_like(w);
    router_backward(in[1], ids, x, w, options, 1.0, d_logits, dx, dw);
    return std::vector<at::Tensor>{ids, probs, d_logits};
  });
}

// Sums over rows: the same bits with any number of threads.
TEST_P(RowBits, SumsOverRowsIgnoreThreads) {
  const int64_t rows = 3000, width = 130, vocab = 17;
  const at::Tensor x = draw({rows, width}), dy = draw({rows, width}), w = draw({width});
  const at::Tensor ids = at::randint(0, vocab, {rows}, at::kLong);
  const at::Tensor logits = at::randn({rows, 8});
  std::vector<at::Tensor> norms, tables;
  std::vector<double> losses, squares;
  testing::for_threads([&](int) {
    at::Tensor out = at::empty_like(x), rstd = at::empty({rows}), dx = at::zeros_like(x);
    norms.push_back(at::zeros({width}));
    rms_norm_forward(x, w, 1e-6, out, rstd);
    rms_norm_backward(dy, x, w, rstd, dx, true, norms.back());
    tables.push_back(at::zeros({vocab, width}));
    embedding_backward(ids, dy, tables.back());
    at::Tensor chosen = at::empty({rows, 2}, at::kInt), probs = at::empty({rows, 2});
    losses.push_back(router_select(logits, {}, {2, true, 1.0, 1.0}, false, chosen, probs).aux);
    squares.push_back(squared_norm(at::cat({logits, logits, logits}).view({-1})));
  });
  EXPECT_TRUE(same_bits(norms[0], norms[1]));
  EXPECT_TRUE(same_bits(tables[0], tables[1]));
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_EQ(squares[0], squares[1]);
}

TEST_P(RowBits, RopeIgnoresThreads) {
  at::Tensor cos = at::rand({100, 20}), sin = at::rand({100, 20});
  const at::Tensor x = draw({1000, 4, 20});
  std::vector<at::Tensor> turned;
  testing::for_threads([&](int) {
    turned.push_back(x.clone());
    rope_forward_inplace(turned.back(), cos, sin);
  });
  EXPECT_TRUE(same_bits(turned[0], turned[1]));
}

TEST_P(RowBits, DropoutMaskIsAFunctionOfSeedAndIndex) {
  const at::Tensor ones = at::ones({300, 101}, at::dtype(testing::scalar_type(dtype_)));
  std::vector<at::Tensor> masked;
  testing::for_threads([&](int) {
    masked.push_back(ones.clone());
    dropout_forward_inplace(masked.back(), 0.25, 42);
  });
  at::Tensor backward = at::empty_like(ones), other = ones.clone();
  dropout_backward(ones, 0.25, 42, backward);
  dropout_forward_inplace(other, 0.25, 43);
  EXPECT_TRUE(same_bits(masked[0], masked[1]));
  EXPECT_TRUE(same_bits(masked[0], backward));
  EXPECT_FALSE(same_bits(masked[0], other));
  // 30,300 draws: the dropped share has a standard deviation of 0.0025.
  EXPECT_NEAR(masked[0].eq(0).to(at::kFloat).mean().item<double>(), 0.25, 0.0125);
  EXPECT_NEAR(masked[0].max().item<double>(), 1 / 0.75, 0.01);
}

TEST(Bf16Rounding, AgreesWithTorch) {
  const at::Tensor values =
      at::cat({at::randn({1000}), at::tensor({NAN, INFINITY, -INFINITY, 0.0f, 1e-40f, 3.4e38f})});
  at::Tensor ours = at::empty({values.numel()}, at::kBFloat16);
  cast_working_copy(values, ours);
  EXPECT_TRUE(at::equal(ours.view(at::kShort).narrow(0, 0, 1000),
                        values.to(at::kBFloat16).view(at::kShort).narrow(0, 0, 1000)));
  EXPECT_TRUE(at::allclose(ours.to(at::kFloat), values.to(at::kBFloat16).to(at::kFloat), 0, 0,
                           /*equal_nan=*/true));
}

TEST(Optimizer, AdamwMatchesTheFormula) {
  at::NoGradGuard no_grad;
  at::manual_seed(2);
  at::Tensor p = at::randn({1000}), g = at::randn({1000}), m = at::zeros({1000});
  at::Tensor v = at::zeros({1000});
  const at::Tensor start = p.clone();
  const AdamwOptions options{0.01, 0.9, 0.95, 1e-8, 0.1};
  adamw_step(p, g, m, v, 1, options);
  // First step: both corrected moments are g and g^2.
  const at::Tensor expected = start * (1 - 0.01 * 0.1) - 0.01 * g / (g.abs() + 1e-8);
  EXPECT_LE(testing::relative_error(p, expected), 1e-6);
  EXPECT_DOUBLE_EQ(clip_factor(0.5, 1.0), 1.0);
  EXPECT_NEAR(clip_factor(4.0, 1.0), 0.25, 1e-6);
  EXPECT_NEAR(squared_norm(g), g.to(at::kDouble).square().sum().item<double>(), 1e-9);
}

}  // namespace
}  // namespace bagualu::ops
