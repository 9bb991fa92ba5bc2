#include "bagualu/runtime/activation_store_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

using enum StorageState;

TEST(StorageRecord, OnlyTheseStepsAreLegal) {
  const std::set<std::pair<StorageState, StorageState>> legal = {{kEmpty, kLive},
                                                                 {kLive, kD2H},
                                                                 {kRecomputed, kD2H},
                                                                 {kD2H, kHost},
                                                                 {kHost, kH2D},
                                                                 {kH2D, kLive},
                                                                 {kLive, kDropped},
                                                                 {kRecomputed, kDropped},
                                                                 {kDropped, kRecomputed},
                                                                 {kLive, kEncoded},
                                                                 {kRecomputed, kEncoded},
                                                                 {kEncoded, kLive},
                                                                 {kLive, kLent},
                                                                 {kRecomputed, kLent},
                                                                 {kLent, kLive},
                                                                 {kLive, kReleased},
                                                                 {kRecomputed, kReleased},
                                                                 {kHost, kReleased}};
  for (int from = 0; from < kStorageStates; ++from) {
    for (int to = 0; to < kStorageStates; ++to) {
      const std::pair step(static_cast<StorageState>(from), static_cast<StorageState>(to));
      EXPECT_EQ(is_legal(step.first, step.second), legal.contains(step))
          << state_name(step.first) << " -> " << state_name(step.second);
    }
  }
}

TEST(StorageRecord, IllegalStepDumpsKeyAndHistory) {
  StorageRecord record(3, 1, {"moe_act.out", 2});
  record.move(kLive, "put", 7);
  record.move(kD2H, "offload");
  try {
    record.move(kDropped, "drop");
    FAIL();
  } catch (const InternalError& error) {
    EXPECT_THAT(error.what(),
                testing::AllOf(testing::HasSubstr("drop: illegal step D2H -> DROPPED"),
                               testing::HasSubstr("step 3 microbatch 1 layer 2 storage "
                                                  "moe_act.out generation 7"),
                               testing::HasSubstr("EMPTY > LIVE > D2H")));
  }
  EXPECT_EQ(record.state(), kD2H);
}

}  // namespace
}  // namespace bagualu
