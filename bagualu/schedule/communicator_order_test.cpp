#include "bagualu/schedule/communicator_order.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <utility>

#include "bagualu/schedule/dual_batch_cache.h"
#include "bagualu/schedule/dual_batch_families.h"
#include "bagualu/schedule/verify_schedule.h"

namespace bagualu {
namespace {

using Sequences = std::vector<std::vector<std::string>>;

constexpr int kRanks = 64;

TEST(CommunicatorOrder, OneSequenceIsInOrder) {
  EXPECT_EQ(communicator_order_fault({}), "");
  EXPECT_EQ(communicator_order_fault({{"a"}}), "");
  EXPECT_EQ(communicator_order_fault({{"a", "b"}, {"a", "b"}}), "");
}

TEST(CommunicatorOrder, NamesTheFirstPlaceWhereARankDeparts) {
  EXPECT_EQ(communicator_order_fault({{"a", "b", "c"}, {"a", "b", "c"}, {"a", "c", "b"}}),
            "communication 1: rank 0 issues b, rank 2 issues c");
  EXPECT_EQ(communicator_order_fault({{"a", "b"}, {"a"}}),
            "communication 1: rank 0 issues b, rank 1 issues nothing");
  EXPECT_EQ(communicator_order_fault({{"a"}, {"a", "b"}}),
            "communication 1: rank 0 issues nothing, rank 1 issues b");
}

// What one rank would run: its own loads and noise (the seed), it may stop its search early, and
// its cache may hold what other micro-batches left.
std::vector<std::string> sequence_of_rank(int rank, bool pinned, FamilyKind kind) {
  std::mt19937_64 random(static_cast<uint64_t>(rank) + 100);
  const DualBatchInstance instance =
      family_instance({FamilyTimes::kDeepSeekV3, kind, 4}, pinned, random);
  SolveOptions options;
  if (rank % 3 == 1) options.beam = 0;
  if (rank % 5 == 2) options.deadline_ns = 1;
  ScheduleCache cache;
  for (int before = 0; before < rank % 4; ++before) {
    cache.solve(family_instance({FamilyTimes::kDeepSeekV3, kind, 4}, pinned, random));
  }
  if (rank % 2) cache.solve(instance, options);
  const DualBatchSchedule schedule = cache.solve(instance, options);
  // What a deadline cut short is not kept.
  if (rank % 2 == 1 && options.deadline_ns == 0) {
    EXPECT_EQ(schedule.source, ScheduleSource::kCache);
  }
  EXPECT_EQ(verify_schedule(instance, schedule), std::vector<std::string>());
  return communications(instance, schedule.order);
}

Sequences sequences(bool pinned, FamilyKind kind) {
  Sequences by_rank;
  for (int rank = 0; rank < kRanks; ++rank) {
    by_rank.push_back(sequence_of_rank(rank, pinned, kind));
  }
  return by_rank;
}

TEST(CommunicatorOrder, RanksWithTheirOwnLoadsAgreeIfItIsPinned) {
  for (FamilyKind kind : {FamilyKind::kForwardHot, FamilyKind::kBackwardHot, FamilyKind::kCommSlow,
                          FamilyKind::kHostSync}) {
    const Sequences by_rank = sequences(true, kind);
    EXPECT_EQ(by_rank[0].size(), 16u);  // four per layer
    EXPECT_EQ(communicator_order_fault(by_rank), "");
  }
}

// Why it is pinned.
TEST(CommunicatorOrder, RanksLeftToThemselvesDoNotAgree) {
  const Sequences by_rank = sequences(false, FamilyKind::kBackwardHot);
  EXPECT_NE(communicator_order_fault(by_rank), "");
  EXPECT_GE(std::set(by_rank.begin(), by_rank.end()).size(), 3u);
}

TEST(CommunicatorOrder, FindsAnySwapOnAnyRank) {
  const Sequences good = sequences(true, FamilyKind::kBalanced);
  for (int rank = 1; rank < kRanks; rank += 9) {
    for (size_t place = 0; place + 1 < good[0].size(); ++place) {
      Sequences wrong = good;
      std::swap(wrong[rank][place], wrong[rank][place + 1]);
      EXPECT_EQ(communicator_order_fault(wrong),
                "communication " + std::to_string(place) + ": rank 0 issues " + good[0][place] +
                    ", rank " + std::to_string(rank) + " issues " + good[0][place + 1]);
    }
  }
}

}  // namespace
}  // namespace bagualu
