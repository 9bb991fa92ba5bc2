#include "bagualu/schedule/overlap_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "bagualu/base/error.h"
#include "bagualu/schedule/pipeline_text.h"

namespace bagualu {
namespace {

using ::testing::HasSubstr;

constexpr PipelineKind kOverlapped[] = {
    PipelineKind::k1F1B, PipelineKind::kInterleaved, PipelineKind::kZbH1,     PipelineKind::kZbH2,
    PipelineKind::kZbV,  PipelineKind::kDualPipe,    PipelineKind::kDualPipeV};

TEST(OverlapOrder, EveryShapeRunsToItsEnd) {
  for (PipelineKind kind : kOverlapped) {
    for (int pp = 1; pp <= 8; ++pp) {
      if (kind == PipelineKind::kDualPipe && pp % 2 != 0) continue;
      for (int per_rank = 1; per_rank <= (kind == PipelineKind::kInterleaved ? 4 : 1); ++per_rank) {
        for (int m = 1; m <= 20; ++m) {
          for (bool overlap : {false, true}) {
            const OverlapOrder order = make_overlap_order(kind, pp, per_rank, m, overlap);
            ASSERT_EQ(order_fault(order, kind), std::nullopt)
                << pipeline_kind_name(kind) << " pp " << pp << " v " << per_rank << " m " << m
                << "\n"
                << order_text(order);
          }
        }
      }
    }
  }
}

TEST(OverlapOrder, OneRankRunsAForwardAheadOfEveryBackward) {
  EXPECT_EQ(order_text(make_overlap_order(PipelineKind::k1F1B, 1, 1, 3)),
            "0F0 [0F1|0B0] [0F2|0B1] 0B2\n");
  EXPECT_EQ(order_text(make_overlap_order(PipelineKind::k1F1B, 1, 1, 1)), "0F0 0B0\n");
}

TEST(OverlapOrder, WarmUpHasASlotPerRankThereAndBack) {
  EXPECT_EQ(order_text(make_overlap_order(PipelineKind::k1F1B, 2, 1, 5)),
            "0F0 0F1 0F2 [0F3|0B0] [0F4|0B1] 0B2 0B3 0B4\n"
            "1F0 [1F1|1B0] [1F2|1B1] [1F3|1B2] [1F4|1B3] 1B4\n");
}

}  // namespace
}  // namespace bagualu
