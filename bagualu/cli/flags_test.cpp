#include "bagualu/cli/flags.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

TEST(Flags, ReadIntegers) {
  EXPECT_EQ(parse_int_flag("1", "test", "--ep", 1, 4), 1);
  EXPECT_EQ(parse_int_flag("4", "test", "--ep", 1, 4), 4);
  for (const char* text :
       {"", "0", "5", "-1", "1.5", "two", "1 ", " 1", "0x1", "1e1", "99999999999999999999"}) {
    EXPECT_THROW(parse_int_flag(text, "test", "--ep", 1, 4), InvalidInput) << text;
  }
}

TEST(Flags, ReadNumbers) {
  EXPECT_EQ(parse_number_flag("2.6", "test", "--imbalance", 1, 10), 2.6);
  for (const char* text : {"", "0.9", "11", "nan", "inf", "x", "2.6x"}) {
    EXPECT_THROW(parse_number_flag(text, "test", "--imbalance", 1, 10), InvalidInput) << text;
  }
}

TEST(Flags, ReadNames) {
  const std::vector<std::string> known = {"a", "b", "c"};
  EXPECT_EQ(parse_names_flag("c,a", "test", "--policy", known),
            (std::vector<std::string>{"c", "a"}));
  for (const char* text : {"", "d", "a,", ",a", "a,,b", "a,a", "a b"}) {
    EXPECT_THROW(parse_names_flag(text, "test", "--policy", known), InvalidInput) << text;
  }
}

}  // namespace
}  // namespace bagualu
