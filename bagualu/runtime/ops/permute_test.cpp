#include "bagualu/runtime/ops/permute.h"

#include <vector>

#include "bagualu/runtime/ops/testing.h"

namespace bagualu::ops {
namespace {

// One rank that is its own only peer for `peers` blocks of experts: what it packs is what
// "arrives".
struct Exchange {
  int64_t tokens, hidden, experts, top_k, peers;
  at::Tensor x, probs, ids, row_map;
  std::vector<int64_t> counts;

  Exchange(int64_t t, int64_t h, int64_t e, int64_t k, int64_t p, Dtype dtype)
      : tokens(t), hidden(h), experts(e), top_k(k), peers(p), counts(e) {
    x = testing::random({t, h}, dtype);
    probs = at::rand({t, k});
    ids = at::rand({t, e})
              .argsort(/*dim=*/int64_t{1}, /*descending=*/false)
              .narrow(1, 0, k)
              .to(at::kInt)
              .contiguous();
    row_map = at::empty({t * k}, at::kInt);
    build_row_map({ids.data_ptr<int32_t>(), static_cast<size_t>(t * k)}, e,
                  {row_map.data_ptr<int32_t>(), static_cast<size_t>(t * k)}, counts);
  }
  WireLayout layout(bool with_probs) const {
    std::vector<int64_t> rows(peers, 0);
    for (int64_t e = 0; e < experts; ++e) rows[e / (experts / peers)] += counts[e];
    return WireLayout(rows, hidden * x.element_size(), with_probs);
  }
  at::Tensor wire(bool with_probs) const {
    return at::zeros({layout(with_probs).total_bytes()}, at::kByte);
  }
};

class Permute : public ::testing::TestWithParam<Dtype> {
 protected:
  Permute() { at::manual_seed(11); }
};
INSTANTIATE_TEST_SUITE_P(Dtypes, Permute, ::testing::Values(Dtype::kFp32, Dtype::kBf16),
                         [](const auto& info) {
                           return info.param == Dtype::kFp32 ? "Fp32" : "Bf16";
                         });

TEST_P(Permute, CombineOfPackedRowsIsTopKTimesTheToken) {
  for (int64_t peers : {1, 2, 4}) {
    const Exchange e(19, 10, 8, 2, peers, GetParam());
    at::Tensor wire = e.wire(true), aten = e.wire(true);
    pack_rows(e.x, e.probs, e.row_map, e.layout(true), wire);
    detail::pack_rows_aten(e.x, e.probs, e.row_map, e.layout(true), aten);
    EXPECT_TRUE(at::equal(wire, aten));
    at::Tensor out = at::ones_like(e.x), d_probs = at::empty_like(e.probs);
    combine_rows(wire, e.row_map, e.layout(true), /*accumulate=*/false, out, d_probs);
    EXPECT_TRUE(at::equal(out, e.x * 2));
    EXPECT_TRUE(at::equal(d_probs, e.probs));
    at::Tensor aten_out = at::ones_like(e.x), aten_probs = at::empty_like(e.probs);
    detail::combine_rows_aten(wire, e.row_map, e.layout(true), true, aten_out, aten_probs);
    combine_rows(wire, e.row_map, e.layout(true), /*accumulate=*/true, out.fill_(1), d_probs);
    EXPECT_TRUE(at::equal(out, aten_out));
    EXPECT_TRUE(at::equal(aten_probs, e.probs));
  }
}

// Receiver with 3 sources and 2 experts; sources send different numbers, one of them nothing.
TEST_P(Permute, PiecesLeaveAndReturnToTheirPlace) {
  const std::vector<int64_t> counts = {3, 5, 0, 0, 4, 1};
  const ReceivedRows received(counts, 3, 2);
  const int64_t hidden = 6;
  for (bool with_probs : {true, false}) {
    const at::Tensor rows = testing::random({13, hidden}, GetParam());
    const at::Tensor row_probs = with_probs ? at::rand({13}) : at::Tensor();
    const WireLayout layout(received.source_rows(), hidden * rows.element_size(), with_probs);
    at::Tensor wire = at::zeros({layout.total_bytes()}, at::kByte);
    for (int64_t expert = 0; expert < 2; ++expert) {
      const int64_t n = received.expert_rows(expert), begin = received.expert_begin(expert);
      for (int64_t at_row = 0; at_row < n; at_row += 4) {
        const int64_t p = std::min<int64_t>(4, n - at_row);
        scatter_piece(rows.narrow(0, begin + at_row, p),
                      with_probs ? row_probs.narrow(0, begin + at_row, p) : at::Tensor(), layout,
                      received, expert, at_row, wire);
      }
    }
    at::Tensor back = at::zeros_like(rows),
               back_probs = with_probs ? at::zeros({13}) : at::Tensor();
    unpack_rows(wire, layout, received, back, back_probs);
    EXPECT_TRUE(at::equal(back, rows));
    EXPECT_TRUE(!with_probs || at::equal(back_probs, row_probs));
    // Expert 1's second source is source 2: its row lies behind source 2's four of expert 0.
    const at::Tensor wire_row =
        wire.narrow(0, layout.row_begin(2, layout.first_row(2) + 4), layout.row_bytes())
            .view(rows.scalar_type());
    EXPECT_TRUE(at::equal(wire_row, rows[12]));
  }
}

TEST_P(Permute, NothingToSendIsLegal) {
  const std::vector<int64_t> counts(4, 0);
  const ReceivedRows received(counts, 2, 2);
  const WireLayout layout({0, 0}, 8, true);
  at::Tensor wire = at::empty({0}, at::kByte), probs = at::empty({0});
  at::Tensor rows = at::empty({0, GetParam() == Dtype::kFp32 ? 2 : 4},
                              at::dtype(testing::scalar_type(GetParam())));
  unpack_rows(wire, layout, received, rows, probs);
  pack_rows(rows, probs, at::empty({0}, at::kInt), layout, wire);
}

// Adding in another order than by slot would give another last bit.
TEST(PermuteBits, CombineAddsInSlotOrder) {
  at::manual_seed(12);
  const Exchange e(64, 16, 8, 4, 2, Dtype::kFp32);
  const WireLayout layout = e.layout(false);
  const at::Tensor sent = at::randn({e.tokens * e.top_k, e.hidden});
  const at::Tensor wire = sent.view({-1}).view(at::kByte);
  at::Tensor out = at::empty_like(e.x), none;
  combine_rows(wire, e.row_map, layout, false, out, none);
  const at::Tensor map = e.row_map.to(at::kLong).view({e.tokens, e.top_k});
  at::Tensor expected = sent.index_select(0, map.select(1, 0));
  for (int64_t slot = 1; slot < e.top_k; ++slot) {
    expected = expected + sent.index_select(0, map.select(1, slot));
  }
  EXPECT_TRUE(at::equal(out, expected));
}

}  // namespace
}  // namespace bagualu::ops
