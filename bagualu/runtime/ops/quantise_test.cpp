#include "bagualu/runtime/ops/quantise.h"

#include <cmath>
#include <limits>

#include "bagualu/cost/block_codes.h"
#include "bagualu/runtime/ops/testing.h"

namespace bagualu::ops {
namespace {

using testing::for_threads;
using testing::same_bits;

at::Tensor buffer_for(const at::Tensor& values) {
  return at::empty({block_code_bytes(static_cast<int64_t>(values.nbytes()),
                                     static_cast<int64_t>(values.element_size()))},
                   at::kByte);
}

at::Tensor round_trip(const at::Tensor& values) {
  at::Tensor codes = buffer_for(values);
  at::Tensor back = at::empty_like(values);
  quantise_encode(values, codes);
  quantise_decode(codes, back);
  return back;
}

TEST(Quantise, ErrorIsAtMostHalfACodeOfTheBlock) {
  at::manual_seed(1);
  for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
    for (const int64_t n : {1, 2, 127, 128, 129, 1000, 40000}) {
      // Blocks of very different magnitude: a scale must not leak into its neighbour.
      const at::Tensor values =
          (at::randn({n}) * at::arange(n, at::kFloat).div_(64).exp2_().clamp_max_(1e6))
              .to(testing::scalar_type(dtype));
      const at::Tensor back = round_trip(values);
      for (int64_t first = 0; first < n; first += kCodeBlockElements) {
        const int64_t size = std::min(kCodeBlockElements, n - first);
        const at::Tensor block = values.narrow(0, first, size).to(at::kDouble);
        const double largest = block.abs().max().item<double>();
        const double error =
            (back.narrow(0, first, size).to(at::kDouble) - block).abs().max().item<double>();
        // bf16 rounds the decoded value once more, by at most 2^-8 of it.
        const double rounding = dtype == Dtype::kBf16 ? std::exp2(-8) : 1e-6;
        EXPECT_LE(error, largest * (1.0 / 254 + rounding)) << n << " " << first;
      }
    }
  }
}

TEST(Quantise, ValuesOnTheGridComeBackExactly) {
  // Largest magnitude 127 gives a scale of 1: integers are codes.
  at::Tensor values = at::arange(-127, 128, at::kFloat);
  values = at::cat({values.narrow(0, 0, 128), values.narrow(0, 127, 128)});
  EXPECT_TRUE(same_bits(round_trip(values), values));
  EXPECT_TRUE(same_bits(round_trip(at::zeros({300})), at::zeros({300})));
}

TEST(Quantise, HalvesRoundToEven) {
  at::Tensor values = at::zeros({128});
  values[0] = 127.0f;
  values[1] = 0.5f;
  values[2] = 1.5f;
  values[3] = -2.5f;
  const at::Tensor back = round_trip(values);
  EXPECT_EQ(back[1].item<float>(), 0.0f);
  EXPECT_EQ(back[2].item<float>(), 2.0f);
  EXPECT_EQ(back[3].item<float>(), -2.0f);
}

TEST(Quantise, WhatIsNotFiniteDoesNotVanish) {
  for (const float bad :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    at::Tensor values = at::ones({256});
    values[200] = bad;
    const at::Tensor back = round_trip(values);
    EXPECT_TRUE(back.narrow(0, 0, 128).isfinite().all().item<bool>());
    EXPECT_TRUE(back.narrow(0, 128, 128).isnan().all().item<bool>());
  }
}

TEST(Quantise, TinyBlocksDecodeToZeroOrNearIt) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  EXPECT_LE(round_trip(at::full({128}, tiny)).abs().max().item<float>(), tiny);
}

TEST(Quantise, StridesAndZeroSizes) {
  const at::Tensor values = at::randn({5, 60}).t();
  EXPECT_LE(testing::relative_error(round_trip(values), values), 1.0 / 254 + 1e-6);
  EXPECT_EQ(round_trip(at::empty({0, 7})).numel(), 0);
}

TEST(Quantise, SameBitsForAnyThreadsAndAsTheAtenPath) {
  at::manual_seed(2);
  for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
    const at::Tensor values = testing::random({33, 1001}, dtype, 3.0);
    at::Tensor expected = buffer_for(values);
    detail::quantise_encode_aten(values, expected);
    at::Tensor expected_back = at::empty_like(values);
    detail::quantise_decode_aten(expected, expected_back);
    for_threads([&](int) {
      at::Tensor codes = buffer_for(values);
      quantise_encode(values, codes);
      EXPECT_TRUE(same_bits(codes, expected));
      at::Tensor back = at::empty_like(values);
      quantise_decode(codes, back);
      EXPECT_TRUE(same_bits(back, expected_back));
    });
  }
}

}  // namespace
}  // namespace bagualu::ops
