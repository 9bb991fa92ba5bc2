#include "bagualu/base/error.h"

#include <gtest/gtest.h>

#include <string>

namespace bagualu {
namespace {

TEST(InvalidInput, SaysWhereWhatAndAllowed) {
  const InvalidInput error("run.json", "budget", "-1", "a positive number");
  EXPECT_STREQ(error.what(), "run.json: budget: found -1; allowed a positive number");
  EXPECT_EQ(error.where(), "run.json");
  EXPECT_EQ(error.field(), "budget");
  EXPECT_EQ(error.found(), "-1");
  EXPECT_EQ(error.allowed(), "a positive number");
}

TEST(InvalidInput, IsOneLineWhateverTheFileHolds) {
  const InvalidInput error("run.json", "a\nb", "x\ty", "text");
  EXPECT_STREQ(error.what(), "run.json: a\\x0ab: found x\\x09y; allowed text");
}

TEST(Check, PassesWithoutEvaluatingTheValues) {
  int evaluated = 0;
  BGL_CHECK(true, ++evaluated);
  EXPECT_EQ(evaluated, 0);
}

TEST(Check, ThrowsWithExpressionPlaceAndValues) {
  const int rows = 7;
  try {
    BGL_CHECK(rows < 5, rows, "of", 5.5);
    FAIL() << "did not throw";
  } catch (const InternalError& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("error_test.cpp:"), std::string::npos) << what;
    EXPECT_NE(what.find("check failed: rows < 5 [7, of, 5.5]"), std::string::npos) << what;
  }
}

TEST(Check, NeedsNoValues) { EXPECT_THROW(BGL_CHECK(1 > 2), InternalError); }

}  // namespace
}  // namespace bagualu
