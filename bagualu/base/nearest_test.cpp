#include "bagualu/base/nearest.h"

#include <gtest/gtest.h>

namespace bagualu {
namespace {

TEST(Nearest, DistanceCountsLetters) {
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);  // k to s, e to i, g more
}

TEST(Nearest, FirstOfTheClosestNames) {
  EXPECT_EQ(nearest_name("laers", {"heads", "layers", "lasers"}), "layers");
  EXPECT_EQ(nearest_name("x", {}), "");
}

}  // namespace
}  // namespace bagualu
