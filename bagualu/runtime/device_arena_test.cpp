#include "bagualu/runtime/device_arena.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

/// The arena is there once per process, so each test measures from its own base.
class DeviceArenaTest : public testing::Test {
 protected:
  void SetUp() override { arena_.set_budget(BudgetCounter::kNoBudget); }
  void TearDown() override {
    arena_.set_budget(BudgetCounter::kNoBudget);
    EXPECT_EQ(arena_.live_bytes(), base_bytes_);
  }
  int64_t grown() const { return arena_.live_bytes() - base_bytes_; }

  DeviceArena& arena_ = DeviceArena::install(BudgetCounter::kNoBudget);
  int64_t base_bytes_ = arena_.live_bytes();
};

TEST_F(DeviceArenaTest, InstallsOncePerProcess) {
  EXPECT_EQ(&DeviceArena::install(12345), &arena_);
  EXPECT_EQ(arena_.budget_bytes(), 12345);
  EXPECT_EQ(DeviceArena::installed(), &arena_);
  EXPECT_EQ(c10::GetCPUAllocator(), &arena_);
}

TEST_F(DeviceArenaTest, CountsGranulesOfEveryTensor) {
  const at::Tensor one = at::empty({1}, at::kFloat);       // 4 B -> 64
  const at::Tensor some = at::empty({17, 3}, at::kFloat);  // 204 B -> 256
  EXPECT_EQ(grown(), 64 + 256);
  const at::Tensor none = at::empty({0, 5}, at::kFloat);
  EXPECT_EQ(grown(), 64 + 256);
  EXPECT_TRUE(arena_.counts(one));
  EXPECT_TRUE(arena_.counts(none));
}

TEST_F(DeviceArenaTest, KeepsTheAlignmentOfTorch) {
  for (const int64_t size : {1, 100, 5000, 1 << 20}) {
    const at::Tensor tensor = at::empty({size}, at::kByte);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 64, 0u);
  }
}

TEST_F(DeviceArenaTest, PeakSinceMark) {
  { const at::Tensor big = at::empty({1024}, at::kByte); }
  arena_.mark_peak();
  { const at::Tensor small = at::empty({128}, at::kByte); }
  EXPECT_EQ(arena_.peak_bytes() - base_bytes_, 128);
}

TEST_F(DeviceArenaTest, OverBudgetIsTorchOutOfMemoryAndCarriesTheNumbers) {
  arena_.set_budget(base_bytes_ + 1024);
  const at::Tensor held = at::empty({256}, at::kByte);
  try {
    at::empty({1000}, at::kByte);  // charged 1024, left 768
    FAIL();
  } catch (const OverBudget& error) {
    EXPECT_EQ(error.wanted_bytes(), 1024);
    EXPECT_EQ(error.left_bytes(), 768);
    EXPECT_EQ(error.budget_bytes(), base_bytes_ + 1024);
    EXPECT_THAT(error.what(), testing::HasSubstr("wanted 1.0 KiB (1024 B), left 768 B"));
  }
  EXPECT_THROW(at::empty({1000}, at::kByte), c10::OutOfMemoryError);
  EXPECT_EQ(grown(), 256);
  const at::Tensor fits = at::empty({768}, at::kByte);
}

TEST_F(DeviceArenaTest, OperatorOverBudgetLeavesNothingBehind) {
  const at::Tensor a = at::ones({64, 64}, at::kFloat);
  const int64_t before = grown();
  arena_.set_budget(arena_.live_bytes() + 64);
  EXPECT_THROW(at::matmul(a, a), OverBudget);
  EXPECT_EQ(grown(), before);
}

TEST_F(DeviceArenaTest, InnerFailureIsRolledBack) {
  // More than any machine maps: the wrapped allocator throws, not the budget.
  EXPECT_ANY_THROW(at::empty({int64_t{1} << 60}, at::kByte));
  EXPECT_EQ(grown(), 0);
}

TEST_F(DeviceArenaTest, ResizeAndSetDataPtrReleaseTheRightBytes) {
  at::Tensor tensor = at::empty({16}, at::kFloat);  // 64
  tensor.resize_({64});                             // 256, the old block goes
  EXPECT_EQ(grown(), 256);
  at::Tensor other = at::empty({128}, at::kFloat);  // 512
  tensor.storage().set_data_ptr_noswap(arena_.allocate(1024));
  EXPECT_EQ(grown(), 1024 + 512);
  tensor.set_(other);
  EXPECT_EQ(grown(), 512);
}

TEST_F(DeviceArenaTest, BlockSurvivesASwappedDeleter) {
  // What other code does to hang its own work on a block's end.
  static int calls = 0;
  c10::DataPtr block = arena_.allocate(64);
  const auto wrapper = [](void* data) {
    ++calls;
    DeviceArena::installed()->raw_deleter()(data);
  };
  EXPECT_TRUE(block.compare_exchange_deleter(arena_.raw_deleter(), +wrapper));
  block.clear();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(grown(), 0);
}

TEST_F(DeviceArenaTest, RawInterface) {
  void* raw = arena_.raw_allocate(100);
  std::memset(raw, 1, 100);
  EXPECT_EQ(grown(), 128);
  arena_.raw_deallocate(raw);
  EXPECT_EQ(grown(), 0);
  arena_.raw_deallocate(arena_.raw_allocate(0));
}

TEST_F(DeviceArenaTest, CloneCopiesBytes) {
  c10::DataPtr block = arena_.allocate(3);
  std::memcpy(block.get(), "abc", 3);
  const c10::DataPtr copy = arena_.clone(block.get(), 3);
  EXPECT_EQ(std::memcmp(copy.get(), "abc", 3), 0);
  EXPECT_TRUE(arena_.is_simple_data_ptr(copy));
  EXPECT_EQ(grown(), 128);
}

TEST_F(DeviceArenaTest, ForeignMemoryIsNotCounted) {
  float mine[4] = {};
  const at::Tensor foreign = at::from_blob(mine, {4}, at::kFloat);
  EXPECT_EQ(grown(), 0);
  EXPECT_FALSE(arena_.counts(foreign));
}

TEST_F(DeviceArenaTest, BlocksMayBeFreedByAnotherThread) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this] {
      c10::DataPtr block;
      for (size_t i = 1; i < 2000; ++i) {
        block = arena_.allocate(i);
      }
      std::thread([moved = std::move(block)]() mutable { moved.clear(); }).join();
    });
  }
  for (auto& each : threads) {
    each.join();
  }
  EXPECT_EQ(grown(), 0);
}

TEST_F(DeviceArenaTest, RejectsNegativeBudget) {
  EXPECT_THROW(DeviceArena::install(-1), InternalError);
}

}  // namespace
}  // namespace bagualu
