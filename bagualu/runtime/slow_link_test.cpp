#include "bagualu/runtime/slow_link.h"

#include <gtest/gtest.h>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr int64_t kMs = 1'000'000;

TEST(SlowLink, IsOffUnlessARateIsStated) {
  SlowLink link({.bytes_per_s = 0, .latency_ns = kMs});
  EXPECT_FALSE(link.is_on());
  EXPECT_EQ(link.take(5, 1 << 20), 0);
}

TEST(SlowLink, ATransferTakesLatencyAndBytesOverRate) {
  SlowLink link({.bytes_per_s = 1'000'000, .latency_ns = 2 * kMs});
  // 3,000 bytes at 1 MB/s are 3 ms; issued at 10 ms: 10 + 3 + 2.
  EXPECT_EQ(link.take(10 * kMs, 3000), 15 * kMs);
}

TEST(SlowLink, TransfersFollowEachOtherAndTheirLatenciesOverlap) {
  SlowLink link({.bytes_per_s = 1'000'000, .latency_ns = 2 * kMs});
  EXPECT_EQ(link.take(0, 3000), 5 * kMs);        // on the link from 0 to 3
  EXPECT_EQ(link.take(1 * kMs, 4000), 9 * kMs);  // from 3 to 7
  EXPECT_EQ(link.take(20 * kMs, 0), 22 * kMs);   // an idle link, no bytes
  EXPECT_EQ(link.take(21 * kMs, 1000), 24 * kMs);
}

TEST(SlowLink, RefusesNegativeNumbers) {
  EXPECT_THROW(SlowLink({.bytes_per_s = -1}), InternalError);
  EXPECT_THROW(SlowLink({.bytes_per_s = 1, .latency_ns = -1}), InternalError);
}

}  // namespace
}  // namespace bagualu
