#include "bagualu/base/mean.h"

#include <gtest/gtest.h>

namespace bagualu {
namespace {

TEST(MeanWithoutTail, LeavesOutTheLongestInWholeValues) {
  EXPECT_EQ(mean_without_tail({7}, 0.5), 7);
  EXPECT_EQ(mean_without_tail({1000, 10, 20, 30}, 0.25), 20);
  EXPECT_EQ(mean_without_tail({1000, 10, 20, 30}, 0.24), 265);
  EXPECT_EQ(mean_without_tail({4, 6}, 0), 5);
}

}  // namespace
}  // namespace bagualu
