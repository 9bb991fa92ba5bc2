#include "bagualu/graph/pieces.h"

#include <gtest/gtest.h>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

TEST(Pieces, CutEveryExpertApart) {
  // 5 rows in pieces of 2: 2, 2, 1; none for the empty expert; 2 rows: one piece.
  const std::vector<ExpertPiece> pieces = piece_grid({5, 0, 2}, 2);
  ASSERT_EQ(pieces.size(), 4u);
  const int64_t begins[] = {0, 2, 4, 5}, rows[] = {2, 2, 1, 2};
  const int experts[] = {0, 0, 0, 2};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(pieces[i].row_begin, begins[i]);
    EXPECT_EQ(pieces[i].rows, rows[i]);
    EXPECT_EQ(pieces[i].expert, experts[i]);
  }
}

TEST(Pieces, CoverAllRowsOnceForAnyCounts) {
  for (int64_t chunk : {1, 3, 7, 100}) {
    const std::vector<int64_t> counts = {0, 1, 3, 6, 7, 8, 200, 0};
    int64_t next = 0, largest = 0;
    for (const ExpertPiece& piece : piece_grid(counts, chunk)) {
      EXPECT_EQ(piece.row_begin, next);
      EXPECT_GT(piece.rows, 0);
      EXPECT_LE(piece.rows, chunk);
      next += piece.rows;
      largest = std::max(largest, piece.rows);
    }
    EXPECT_EQ(next, 225);
    EXPECT_EQ(layer_load(counts, chunk), (LayerLoad{.rows = 225, .piece_rows = largest}));
  }
}

TEST(Pieces, NoRowsNoPieces) {
  EXPECT_TRUE(piece_grid({0, 0}, 8).empty());
  EXPECT_EQ(layer_load({0, 0}, 8), LayerLoad{});
  EXPECT_THROW(piece_grid({1}, 0), InternalError);
}

TEST(Pieces, WorstCaseIsEveryTokenOfTheGroup) {
  // 4 ranks x 100 tokens, each takes 2 experts of this rank; pieces are cut at 64.
  EXPECT_EQ(worst_case_load(4, 100, 2, 8, 64), (LayerLoad{.rows = 800, .piece_rows = 64}));
  // Top-8 with one local expert: one row per token. One expert never holds more than 400 rows.
  EXPECT_EQ(worst_case_load(4, 100, 8, 1, 1000), (LayerLoad{.rows = 400, .piece_rows = 400}));
}

}  // namespace
}  // namespace bagualu
