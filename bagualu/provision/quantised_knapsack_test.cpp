#include "bagualu/provision/quantised_knapsack.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

namespace bagualu {
namespace {

struct Total {
  int64_t bytes = 0;
  int64_t worth = 0;
};

Total total_of(const std::vector<KnapsackItem>& items, const std::vector<char>& taken) {
  Total total;
  for (size_t i = 0; i < items.size(); ++i) {
    if (taken[i] == 0) continue;
    total.bytes += items[i].bytes;
    total.worth += items[i].worth;
  }
  return total;
}

int64_t best_worth(const std::vector<KnapsackItem>& items, int64_t capacity) {
  int64_t best = 0;
  for (uint32_t set = 0; set < (1U << items.size()); ++set) {
    std::vector<char> taken;
    for (size_t i = 0; i < items.size(); ++i) taken.push_back(static_cast<char>(set >> i & 1U));
    const Total total = total_of(items, taken);
    if (total.bytes <= capacity) best = std::max(best, total.worth);
  }
  return best;
}

std::vector<KnapsackItem> random_items(std::mt19937& random) {
  std::vector<KnapsackItem> items(1 + random() % 12);
  for (KnapsackItem& item : items) {
    item.bytes = 64 * static_cast<int64_t>(random() % 40);
    item.worth = static_cast<int64_t>(random() % 100);
  }
  return items;
}

TEST(QuantisedKnapsack, EqualsExhaustiveEnumeration) {
  std::mt19937 random(3);
  for (int i = 0; i < 500; ++i) {
    const std::vector<KnapsackItem> items = random_items(random);
    const auto capacity = static_cast<int64_t>(random() % 12000);
    const Total total = total_of(items, quantised_knapsack(items, capacity, 1 << 16));
    ASSERT_LE(total.bytes, capacity) << i;
    ASSERT_EQ(total.worth, best_worth(items, capacity)) << i;
  }
}

TEST(QuantisedKnapsack, RoundsUpSoThatFewCellsNeverOverrun) {
  std::mt19937 random(4);
  int64_t worse = 0;
  for (int i = 0; i < 500; ++i) {
    const std::vector<KnapsackItem> items = random_items(random);
    const auto capacity = static_cast<int64_t>(random() % 12000);
    const Total total = total_of(items, quantised_knapsack(items, capacity, 9));
    ASSERT_LE(total.bytes, capacity) << i;
    worse += total.worth < best_worth(items, capacity) ? 1 : 0;
  }
  EXPECT_GT(worse, 0);  // nine cells are really coarse
}

TEST(QuantisedKnapsack, EdgesOfTheCapacity) {
  const std::vector<KnapsackItem> items = {{100, 1}, {0, 5}, {50, 2}};
  EXPECT_THAT(quantised_knapsack(items, -1, 10), testing::ElementsAre(0, 0, 0));
  EXPECT_THAT(quantised_knapsack(items, 0, 10), testing::ElementsAre(0, 1, 0));
  EXPECT_THAT(quantised_knapsack(items, 149, 1000), testing::ElementsAre(0, 1, 1));
  // Two cells of 75 bytes would round 100 + 50 up to 225.
  EXPECT_THAT(quantised_knapsack(items, 150, 2), testing::ElementsAre(1, 1, 1));
  EXPECT_TRUE(quantised_knapsack({}, 10, 10).empty());
}

}  // namespace
}  // namespace bagualu
