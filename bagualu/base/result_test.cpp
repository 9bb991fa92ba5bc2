#include "bagualu/base/result.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

namespace bagualu {
namespace {

TEST(Result, HoldsAValue) {
  Result<int, std::string> result(3);
  EXPECT_TRUE(result.ok());
  EXPECT_TRUE(static_cast<bool>(result));
  EXPECT_EQ(result.value(), 3);
  result.value() = 4;
  EXPECT_EQ(std::as_const(result).value(), 4);
  EXPECT_THROW(result.error(), InternalError);
}

TEST(Result, HoldsAnError) {
  const Result<int, std::string> result(std::string("no room"));
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(result.error(), "no room");
  EXPECT_THROW(result.value(), InternalError);
}

TEST(Result, GivesUpAMoveOnlyValue) {
  Result<std::unique_ptr<int>, std::string> result(std::make_unique<int>(5));
  const std::unique_ptr<int> value = std::move(result).value();
  EXPECT_EQ(*value, 5);
}

}  // namespace
}  // namespace bagualu
