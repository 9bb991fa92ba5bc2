#include "bagualu/runtime/budget_counter.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

TEST(BudgetCounter, ChargesWholeGranules) {
  EXPECT_EQ(BudgetCounter::charged_bytes(0), 0);
  EXPECT_EQ(BudgetCounter::charged_bytes(1), 64);
  EXPECT_EQ(BudgetCounter::charged_bytes(64), 64);
  EXPECT_EQ(BudgetCounter::charged_bytes(65), 128);
}

TEST(BudgetCounter, RefusesOverBudgetAndSaysWhatIsLeft) {
  BudgetCounter counter(128);
  EXPECT_FALSE(counter.reserve(64));
  const auto refusal = counter.reserve(128);  // 64 + 128 > 128
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->wanted_bytes, 128);
  EXPECT_EQ(refusal->left_bytes, 64);
  EXPECT_EQ(refusal->budget_bytes, 128);
  EXPECT_EQ(counter.live_bytes(), 64);
  EXPECT_FALSE(counter.reserve(64));  // exactly full is allowed
}

TEST(BudgetCounter, PeakIsTheMaximumSinceTheMark) {
  BudgetCounter counter;
  EXPECT_FALSE(counter.reserve(640));
  counter.release(512);
  EXPECT_EQ(counter.peak_bytes(), 640);
  counter.mark_peak();
  EXPECT_EQ(counter.peak_bytes(), 128);
  EXPECT_FALSE(counter.reserve(64));
  EXPECT_EQ(counter.peak_bytes(), 192);
}

TEST(BudgetCounter, NoBudgetNeverRefuses) {
  BudgetCounter counter(BudgetCounter::kNoBudget);
  EXPECT_FALSE(counter.reserve(int64_t{1} << 50));
}

TEST(BudgetCounter, BudgetBelowLiveRefusesUntilReleased) {
  BudgetCounter counter(256);
  EXPECT_FALSE(counter.reserve(256));
  counter.set_budget(128);
  const auto refusal = counter.reserve(64);
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->left_bytes, 0);
  counter.release(192);
  EXPECT_FALSE(counter.reserve(64));
}

TEST(BudgetCounter, RejectsNegativeBudget) {
  EXPECT_THROW(BudgetCounter(-1), InternalError);
  BudgetCounter counter;
  EXPECT_THROW(counter.set_budget(-1), InternalError);
}

TEST(BudgetCounter, ThreadsNeverExceedTheBudget) {
  // 4 threads want 3 granules each at once (12), the budget holds 5.
  constexpr int64_t kBudget = 5 * 64;
  BudgetCounter counter(kBudget);
  std::atomic<int> granted = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5000; ++i) {
        if (!counter.reserve(3 * 64)) {
          ++granted;
          counter.release(3 * 64);
        }
      }
    });
  }
  for (auto& each : threads) {
    each.join();
  }
  EXPECT_GT(granted, 0);
  EXPECT_EQ(counter.live_bytes(), 0);
  EXPECT_EQ(counter.peak_bytes(), 3 * 64);  // two at once would be 6 granules
}

}  // namespace
}  // namespace bagualu
