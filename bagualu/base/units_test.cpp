#include "bagualu/base/units.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

TEST(RoundUp, GivesTheNextMultiple) {
  EXPECT_EQ(round_up(0, 64), 0);
  EXPECT_EQ(round_up(1, 64), 64);
  EXPECT_EQ(round_up(64, 64), 64);
  EXPECT_EQ(round_up(65, 64), 128);
}

TEST(RoundUp, RefusesNonsenseAndOverflow) {
  EXPECT_THROW(round_up(-1, 64), InternalError);
  EXPECT_THROW(round_up(1, 0), InternalError);
  EXPECT_THROW(round_up(std::numeric_limits<int64_t>::max(), 64), InternalError);
}

TEST(FormatBytes, PicksTheUnit) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.0 KiB");
  EXPECT_EQ(format_bytes(96 * kMiB), "96.0 MiB");
  EXPECT_EQ(format_bytes(3 * kGiB / 2), "1.5 GiB");
  EXPECT_EQ(format_bytes(2048 * kGiB), "2.0 TiB");
  EXPECT_EQ(format_bytes(-2048), "-2.0 KiB");
}

TEST(FormatBytes, NeverPrints1024OfAUnit) {
  EXPECT_EQ(format_bytes(kMiB - 1), "1.0 MiB");
  EXPECT_EQ(format_bytes(kGiB - 1), "1.0 GiB");
}

TEST(FormatNs, PicksTheUnit) {
  EXPECT_EQ(format_ns(850), "850 ns");
  EXPECT_EQ(format_ns(12'345), "12.3 us");
  EXPECT_EQ(format_ns(4'560'000), "4.56 ms");
  EXPECT_EQ(format_ns(1'234'000'000), "1.23 s");
}

TEST(ParseBytes, ReadsUnits) {
  EXPECT_EQ(parse_bytes("123", "flag", "budget"), 123);
  EXPECT_EQ(parse_bytes("123B", "flag", "budget"), 123);
  EXPECT_EQ(parse_bytes("96MiB", "flag", "budget"), 96 * kMiB);
  EXPECT_EQ(parse_bytes(" 96 MiB ", "flag", "budget"), 96 * kMiB);
  EXPECT_EQ(parse_bytes("1.5GiB", "flag", "budget"), 3 * kGiB / 2);
  EXPECT_EQ(parse_bytes("64KB", "flag", "budget"), 64'000);
  EXPECT_EQ(parse_bytes("2TiB", "flag", "budget"), 2048 * kGiB);
  EXPECT_EQ(parse_bytes("3TB", "flag", "budget"), 3'000'000'000'000);
}

TEST(ParseBytes, RefusesNonsense) {
  for (const char* text : {"",           " ",
                           "0",          "0MiB",
                           "0.1",        "-1",
                           "-5MiB",      "+5",
                           "MiB",        "12 parsecs",
                           "12mib",      "1e3",
                           "1.2.3",      ".",
                           "1,5GiB",     "9223372036854775808",
                           "9000000TiB", "99999999999999.5TiB",
                           "nan",        "5MiB5",
                           "0x10"}) {
    EXPECT_THROW(parse_bytes(text, "flag", "budget"), InvalidInput) << text;
  }
}

TEST(ParseBytes, NamesThePlaceAndTheText) {
  try {
    parse_bytes("12 parsecs", "bagualu plan", "--budget");
    FAIL() << "did not throw";
  } catch (const InvalidInput& error) {
    EXPECT_EQ(error.where(), "bagualu plan");
    EXPECT_EQ(error.field(), "--budget");
    EXPECT_EQ(error.found(), "\"12 parsecs\"");
  }
}

}  // namespace
}  // namespace bagualu
