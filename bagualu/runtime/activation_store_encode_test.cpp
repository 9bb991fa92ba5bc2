#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/runtime/activation_store.h"
#include "bagualu/runtime/transfer_fake.h"

namespace bagualu {
namespace {

using testing::HasSubstr;

template <class F>
std::string message_of(F&& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "(no exception)";
}

/// Storages 0 and 1 of a micro-batch.
class EncodeTest : public testing::Test {
 protected:
  void SetUp() override { store_.begin(3, 1, {{"qkv.out", 0}, {"moe_act.out", 2}}); }
  void TearDown() override {
    store_.abort();
    arena_.set_budget(BudgetCounter::kNoBudget);
    EXPECT_EQ(arena_.live_bytes(), base_bytes_);
  }
  int64_t grown() const { return arena_.live_bytes() - base_bytes_; }

  DeviceArena& arena_ = DeviceArena::install(BudgetCounter::kNoBudget);
  int64_t base_bytes_ = arena_.live_bytes();
  HostArena host_{{64 * kKiB, 0, {}}};
  FakeTransferEngine engine_;
  ActivationStore store_{arena_, host_, engine_, {.verify_checksums = true}};
};

TEST_F(EncodeTest, EncodedStorageTakesExactlyItsCodes) {
  at::Tensor original = at::randn({30, 9}).t();
  const at::Tensor expected = original.clone();
  store_.put(0, std::move(original));
  const int64_t others = grown() - 1088;  // 270 elements: 1080 B, charged as 1088
  store_.encode(0);
  // 1088 B = 272 elements in 3 blocks: 272 codes and 3 scales of 4 B = 284, charged as 320.
  EXPECT_EQ(grown() - others, 320);
  EXPECT_EQ(store_.device_resident_bytes(), 284);
  EXPECT_FALSE(store_.is_live(0));
  store_.decode(0);
  EXPECT_EQ(grown() - others, 1088);
  EXPECT_EQ(store_.device_resident_bytes(), 1080);
  EXPECT_EQ(store_.get(0).strides(), expected.strides());
  EXPECT_LE((store_.get(0) - expected).abs().max().item<float>(),
            expected.abs().max().item<float>() / 253);
  store_.release(0);
  EXPECT_EQ(store_.finish().bytes_encoded, 1080);
}

TEST_F(EncodeTest, Bf16StorageIsEncodedToHalf) {
  store_.put(0, at::randn({512}).to(at::kBFloat16));
  EXPECT_EQ(grown(), 1024);
  store_.encode(0);
  EXPECT_EQ(grown(), 576);  // 512 codes and 4 scales: 528
  store_.decode(0);
  EXPECT_EQ(store_.get(0).scalar_type(), at::kBFloat16);
  store_.release(0);
}

TEST_F(EncodeTest, EncodingOverBudgetChangesNothing) {
  store_.put(0, at::ones({256}));
  arena_.set_budget(arena_.live_bytes() + 64);
  EXPECT_THROW(store_.encode(0), OverBudget);
  EXPECT_TRUE(store_.is_live(0));
  arena_.set_budget(BudgetCounter::kNoBudget);
  store_.encode(0);
  arena_.set_budget(arena_.live_bytes() + 64);
  EXPECT_THROW(store_.decode(0), OverBudget);
  arena_.set_budget(BudgetCounter::kNoBudget);
  store_.decode(0);
  EXPECT_TRUE(at::equal(store_.get(0), at::ones({256})));
  store_.release(0);
}

TEST_F(EncodeTest, OnlyALiveUnsharedFloatingStorageIsEncoded) {
  EXPECT_THROW(store_.encode(0), InternalError);
  EXPECT_THROW(store_.decode(0), InternalError);
  at::Tensor mine = at::ones({4});
  store_.put(0, mine);
  EXPECT_THAT(message_of([&] { store_.encode(0); }), HasSubstr("others hold the storage"));
  mine.reset();
  EXPECT_THROW(store_.decode(0), InternalError);
  store_.put(1, at::ones({4}, at::kInt));
  EXPECT_THROW(store_.encode(1), InternalError);
  EXPECT_TRUE(store_.is_live(1));
  store_.encode(0);
  EXPECT_THAT(message_of([&] { store_.release(0); }), HasSubstr("ENCODED -> RELEASED"));
  EXPECT_THAT(message_of([&] { store_.finish(); }), HasSubstr("still held"));
}

}  // namespace
}  // namespace bagualu
