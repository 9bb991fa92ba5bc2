#include "bagualu/schedule/dual_batch_greedy.h"

#include <gtest/gtest.h>

#include <string>

#include "bagualu/schedule/dual_batch_reference.h"

namespace bagualu {
namespace {

std::string text(const std::vector<ScheduleItem>& order) {
  std::string line;
  for (const ScheduleItem& item : order) {
    line += (line.empty() ? "" : " ") + std::string(1, "FBWR"[static_cast<int>(item.kind)]) +
            std::to_string(item.index);
  }
  return line;
}

TEST(Greedy, StartsWhatCanStartFirstAndThenTheLongestTail) {
  DualBatchInstance instance;
  instance.forward = {{2, Resource::kCompute, false, 0}, {9, Resource::kComm, false, 0}};
  instance.backward = {{3, Resource::kCompute, false, 0}, {1, Resource::kComm, false, 0}};
  instance.weight_grads = {{4, 0}};
  // At 0 F0 has 2 + 9 left, B0 3 + 4: F0. F1 and B0 can start at 2, F1 has 9 left. Then W0 and B1:
  // B1 must wait for F1 until 11, W0 starts at 5.
  EXPECT_EQ(text(greedy_order(instance)), "F0 F1 B0 W0 B1");
}

TEST(Greedy, FollowsEveryRule) {
  for (int k = 0; k < 400; ++k) {
    SmallInstances instances(static_cast<uint64_t>(k));
    const DualBatchInstance instance =
        instances.next(static_cast<SmallKind>(k % kSmallKinds), k % 2 == 0);
    ASSERT_GE(replay(instance, greedy_order(instance)).makespan_ns, 0) << k;  // or it throws
  }
}

}  // namespace
}  // namespace bagualu
