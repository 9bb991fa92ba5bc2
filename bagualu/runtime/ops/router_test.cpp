#include "bagualu/runtime/ops/router.h"

#include "bagualu/runtime/ops/testing.h"

namespace bagualu::ops {
namespace {

using testing::leaf;
using testing::random;
using testing::relative_error;
using testing::tolerance;

struct Routed {
  at::Tensor logits, ids, probs;
  RouterLosses losses;
};

Routed route(const at::Tensor& x, const at::Tensor& w, const RouterOptions& options,
             const at::Tensor& bias = {}, const at::Tensor& spike = {},
             at::ScalarType id_type = at::kInt) {
  Routed r{at::empty({x.size(0), w.size(0)}),
           at::full({x.size(0), options.top_k}, -1, at::dtype(id_type)),
           at::empty({x.size(0), options.top_k}),
           {}};
  r.losses = router_forward(x, w, bias, spike, options, false, r.logits, r.ids, r.probs);
  return r;
}

TEST(Router, LossesAndGradientsMatchAutograd) {
  at::manual_seed(3);
  for (Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
    for (bool norm : {true, false}) {
      const int64_t tokens = 130, h = 24, experts = 13, k = 3;
      const RouterOptions options{k, norm, 0.3, 0.2};
      const at::Tensor x = random({tokens, h}, dtype), w = random({experts, h}, dtype, 0.3);
      const at::Tensor d_probs = at::randn({tokens, k}) * 0.01;
      Routed r = route(x, w, options);
      const at::Tensor xl = leaf(x), wl = leaf(w);
      const at::Tensor logits = at::linear(xl, wl);
      const at::Tensor probs = at::softmax(logits, 1);
      const at::Tensor ids = r.ids.to(at::kLong);
      at::Tensor chosen = probs.gather(1, ids);
      if (norm) chosen = chosen / chosen.sum(1, true);
      const at::Tensor share =
          at::bincount(ids.view({-1}), {}, experts).to(at::kFloat) / (tokens * k);
      const at::Tensor aux = (share * probs.mean(0)).sum() * experts * 0.3;
      const at::Tensor z = at::logsumexp(logits, {1}).square().mean() * 0.2;
      const double bound = tolerance(dtype);
      EXPECT_LE(relative_error(r.probs, chosen), bound);
      EXPECT_NEAR(r.losses.aux / aux.item<double>(), 1.0, bound);
      EXPECT_NEAR(r.losses.z / z.item<double>(), 1.0, bound);
      ((chosen * d_probs).sum() + (aux + z) * 0.5).backward();
      at::Tensor dx = at::ones_like(x), dw = at::zeros({experts, h});
      router_backward(d_probs, r.ids, x, w, options, 0.5, r.logits, dx, dw);
      EXPECT_LE(relative_error(dx, xl.grad() + 1), bound);
      EXPECT_LE(relative_error(dw, wl.grad()), bound);
    }
  }
}

TEST(Router, AtenPathGivesTheSame) {
  at::manual_seed(4);
  const RouterOptions options{2, true, 0.3, 0.2};
  const at::Tensor x = at::randn({70, 16}), w = at::randn({8, 16}), bias = at::randn({8}) * 0.1;
  const Routed r = route(x, w, options, bias);
  at::Tensor ids = at::empty_like(r.ids), probs = at::empty_like(r.probs);
  const RouterLosses losses =
      detail::router_select_aten(r.logits, bias, options, false, ids, probs);
  EXPECT_TRUE(at::equal(ids, r.ids));
  EXPECT_LE(relative_error(probs, r.probs), 1e-6);
  EXPECT_NEAR(losses.aux, r.losses.aux, 1e-6);
  EXPECT_NEAR(losses.z, r.losses.z, 1e-5);
  const at::Tensor d_probs = at::randn({70, 2});
  at::Tensor loops = r.logits.clone(), aten = r.logits.clone();
  at::Tensor dx = at::zeros_like(x), dw = at::zeros_like(w);
  router_backward(d_probs, r.ids, x, w, {2, true, 0, 0.2}, 1.0, loops, dx, dw);
  detail::router_gradient_aten(d_probs, r.ids, at::zeros({8}), 2 * 0.2 / 70, {2, true, 0, 0.2},
                               aten);
  EXPECT_LE(relative_error(loops, aten), 1e-5);
}

TEST(Router, TiesGoToTheLowestExpert) {
  const RouterOptions options{2, true, 0, 0};
  const at::Tensor x = at::zeros({5, 4}), w = at::ones({6, 4});
  const Routed r = route(x, w, options, {}, {}, at::kShort);
  for (int64_t t = 0; t < 5; ++t) {
    EXPECT_EQ(r.ids[t][0].item<int>(), 0);
    EXPECT_EQ(r.ids[t][1].item<int>(), 1);
  }
  EXPECT_TRUE(at::allclose(r.probs, at::full({5, 2}, 0.5)));
}

// A selection bias moves the choice, not the gate value; a spike moves both.
TEST(Router, SelectionBiasAndSpike) {
  at::manual_seed(5);
  const RouterOptions options{1, false, 0, 0};
  const at::Tensor x = at::randn({20, 8}), w = at::randn({4, 8}) * 0.1;
  at::Tensor bias = at::zeros({4});
  bias[3] = 10.0;
  const Routed chosen = route(x, w, options, bias);
  const Routed spiked = route(x, w, options, {}, bias);
  EXPECT_TRUE(chosen.ids.eq(3).all().item<bool>());
  EXPECT_TRUE(spiked.ids.eq(3).all().item<bool>());
  EXPECT_LT(chosen.probs.max().item<double>(), 0.7);
  EXPECT_GT(spiked.probs.min().item<double>(), 0.99);
}

TEST(Router, GivenIdsKeepRealGateValues) {
  at::manual_seed(6);
  const RouterOptions options{2, true, 0.1, 0};
  const at::Tensor x = at::randn({9, 8}), w = at::randn({5, 8});
  at::Tensor logits = at::empty({9, 5}), probs = at::empty({9, 2});
  at::Tensor ids = at::tensor({4, 1}, at::kInt).repeat({9, 1});
  const at::Tensor before = ids.clone();
  router_forward(x, w, {}, {}, options, true, logits, ids, probs);
  EXPECT_TRUE(at::equal(ids, before));
  const at::Tensor real = at::softmax(logits, 1).gather(1, ids.to(at::kLong));
  EXPECT_TRUE(at::allclose(probs, real / real.sum(1, true)));
}

TEST(Router, NanLogitsStillGiveDistinctExperts) {
  const RouterOptions options{2, true, 0, 0};
  const at::Tensor x = at::full({1, 2}, NAN), w = at::ones({3, 2});
  const Routed r = route(x, w, options);
  EXPECT_NE(r.ids[0][0].item<int>(), r.ids[0][1].item<int>());
}

}  // namespace
}  // namespace bagualu::ops
