#include "bagualu/runtime/ops/row_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bagualu/base/error.h"

namespace bagualu::ops {
namespace {

using ::testing::ElementsAre;

TEST(RowMap, SortsByExpertThenToken) {
  // Tokens choose (2,0), (0,1), (2,1): expert 0 gets assignments 1, 2; 1 gets 3, 5; 2 gets 0, 4.
  const std::vector<int32_t> ids = {2, 0, 0, 1, 2, 1};
  std::vector<int32_t> map(6);
  std::vector<int64_t> counts(4);
  build_row_map(ids, 4, map, counts);
  EXPECT_THAT(map, ElementsAre(4, 0, 1, 2, 5, 3));
  EXPECT_THAT(counts, ElementsAre(2, 2, 2, 0));
}

TEST(RowMap, RefusesExpertsThatDoNotExist) {
  const std::vector<int16_t> ids = {0, 3};
  std::vector<int32_t> map(2);
  std::vector<int64_t> counts(3);
  EXPECT_THROW(build_row_map(ids, 3, map, counts), InvalidInput);
}

TEST(WireLayout, PutsProbsBehindTheRowsOfEachPeer) {
  // Rows of 8 bytes: peer 0 has 2 (16 + 8 bytes), peer 1 none, peer 2 has 1 (8 + 4 bytes).
  const WireLayout layout({2, 0, 1}, 8, /*with_probs=*/true);
  EXPECT_EQ(layout.total_bytes(), 36);
  EXPECT_EQ(layout.probs_begin(0), 16);
  EXPECT_EQ(layout.segment_begin(2), 24);
  EXPECT_EQ(layout.segment_bytes(1), 0);
  EXPECT_EQ(layout.peer_of_row(1), 0);
  EXPECT_EQ(layout.peer_of_row(2), 2);
  EXPECT_EQ(layout.row_begin(2, 2), 24);
  EXPECT_EQ(layout.probs_begin(2), 32);
}

TEST(ReceivedRows, OrdersByExpertThenSource) {
  // Source 0 sends 1 and 2 rows, source 1 sends 3 and 0, for experts 0 and 1.
  const std::vector<int64_t> counts = {1, 2, 3, 0};
  const ReceivedRows received(counts, 2, 2);
  EXPECT_EQ(received.rows(), 6);
  EXPECT_EQ(received.expert_rows(0), 4);
  EXPECT_EQ(received.expert_begin(1), 4);
  EXPECT_THAT(received.source_rows(), ElementsAre(3, 3));
  ASSERT_EQ(received.runs(0).size(), 2u);
  EXPECT_EQ(received.runs(0)[1].source, 1);
  EXPECT_EQ(received.runs(0)[1].expert_row, 1);
  ASSERT_EQ(received.runs(1).size(), 1u);
  EXPECT_EQ(received.runs(1)[0].segment_row, 1);
}

}  // namespace
}  // namespace bagualu::ops
