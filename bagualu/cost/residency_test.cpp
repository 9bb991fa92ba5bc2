#include "bagualu/cost/residency.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "bagualu/base/error.h"
#include "bagualu/cost/residency_pricing.h"

namespace bagualu {
namespace {

const ResidencySpec& spec(std::string_view name) {
  return residencies()[residency_from_name(name, "test")];
}

TEST(Residency, FixedIdsMatchTheirNames) {
  EXPECT_EQ(residencies()[kSave].name, "save");
  EXPECT_EQ(residencies()[kRecompute].name, "recompute");
  EXPECT_EQ(residencies()[kOffload].name, "offload");
}

// Contract of every registered residency, yours included.
TEST(Residency, EverySpecIsCompleteAndConsistent) {
  std::set<std::string_view> names;
  for (const ResidencySpec& r : residencies()) {
    EXPECT_TRUE(names.insert(r.name).second) << r.name;
    ASSERT_TRUE(r.device_bytes && r.host_bytes && r.exposed_ns) << r.name;
    int64_t previous_ns = 0;
    for (int64_t bytes : {0, 64, 4096, 1 << 20}) {
      for (int64_t element_bytes : {0, 2, 4}) {
        EXPECT_GE(r.device_bytes(bytes, element_bytes), 0) << r.name;
        EXPECT_LE(r.device_bytes(bytes, element_bytes), bytes) << r.name;
      }
      EXPECT_GE(r.host_bytes(bytes), 0) << r.name;
      const int64_t ns = r.exposed_ns({.bytes = bytes,
                                       .d2h_bytes_per_s = 1e9,
                                       .h2d_bytes_per_s = 1e9,
                                       .encode_bytes_per_s = 1e9});
      EXPECT_GE(ns, previous_ns) << r.name;
      previous_ns = ns;
    }
  }
}

TEST(Residency, OffloadExposesTheUnhiddenShareOfBothCopies) {
  // 1000 bytes at 1 GB/s out (1000 ns) and 2 GB/s back (500 ns); a quarter of 1500 is exposed.
  EXPECT_EQ(
      spec("offload").exposed_ns(
          {.bytes = 1000, .d2h_bytes_per_s = 1e9, .h2d_bytes_per_s = 2e9, .hidden_fraction = 0.75}),
      375);
}

TEST(Residency, OffloadWithoutAHostLinkIsNeverWorthIt) {
  EXPECT_GE(spec("offload").exposed_ns({.bytes = 64}), kUnpricedNs);
  EXPECT_EQ(spec("offload").exposed_ns({.bytes = 0}), 0);
}

TEST(Residency, RecomputeCostsTheRebuild) {
  EXPECT_EQ(spec("recompute").exposed_ns({.bytes = 10, .rebuild_ns = 77}), 77);
  EXPECT_TRUE(spec("recompute").needs_rebuild);
}

TEST(Residency, QuantiseKeepsCodesAndScales) {
  // 1024 bytes = 256 fp32 elements: 256 code bytes, 2 blocks of one 4-byte scale.
  EXPECT_EQ(spec("quantise").device_bytes(1024, 4), 256 + 2 * 4);
  // 512 bf16 elements in 4 blocks.
  EXPECT_EQ(spec("quantise").device_bytes(1024, 2), 512 + 4 * 4);
  // 64 bytes = 16 elements in one block that is not full.
  EXPECT_EQ(spec("quantise").device_bytes(64, 4), 16 + 4);
  // Indices and statistics stay as they are.
  EXPECT_EQ(spec("quantise").device_bytes(1024, 0), 1024);
  EXPECT_TRUE(spec("quantise").changes_numerics);
  EXPECT_EQ(spec("quantise").exposed_ns({.bytes = 1000, .encode_bytes_per_s = 1e9}), 2000);
}

TEST(Residency, UnknownNameListsTheRegisteredOnes) {
  try {
    residency_from_name("swap", "plan.json");
    FAIL() << "expected InvalidInput";
  } catch (const InvalidInput& error) {
    EXPECT_STREQ(error.what(),
                 "plan.json: residency: found swap; allowed save, recompute, offload, quantise");
  }
}

}  // namespace
}  // namespace bagualu
