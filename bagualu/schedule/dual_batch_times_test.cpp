#include "bagualu/schedule/dual_batch_times.h"

#include <gtest/gtest.h>

namespace bagualu {
namespace {

ChainOp compute(int64_t ns) { return {ns, Resource::kCompute, false, 0}; }
ChainOp comm(int64_t ns) { return {ns, Resource::kComm, false, 0}; }

struct HeadTail {
  int64_t head_ns;
  int64_t tail_ns;
  bool operator==(const HeadTail&) const = default;
};

HeadTail at(const PrecedenceTimes& times, int node) {
  return {times.head_ns(node), times.tail_ns(node)};
}
HeadTail at(const PrecedenceTimes& times, ItemKind kind, int index) {
  return at(times, times.node(kind, index));
}

PrecedenceTimes times_of(const DualBatchInstance& instance) {
  PrecedenceTimes times;
  times.build(instance);
  return times;
}

TEST(PrecedenceTimes, FollowsChainsFillersAndCopies) {
  DualBatchInstance instance;
  instance.forward = {compute(3), compute(4)};
  instance.copies_out = {{10, 0, 1}};
  instance.backward = {comm(5), compute(6)};
  instance.weight_grads = {{2, 0}};
  instance.rebuilds = {{8, 1}};
  instance.copies_in = {{7, 1, -1, 0}};
  const PrecedenceTimes times = times_of(instance);
  // Forward: 0-3, copy 3-13, then 13-17. Backward: 0-5, copy 5-12, then 12-18.
  EXPECT_EQ(at(times, ItemKind::kForward, 0), (HeadTail{0, 14}));
  EXPECT_EQ(at(times, times.copy_out(0)), (HeadTail{3, 4}));
  EXPECT_EQ(at(times, ItemKind::kForward, 1), (HeadTail{13, 0}));
  EXPECT_EQ(at(times, ItemKind::kBackward, 0), (HeadTail{0, 13}));
  EXPECT_EQ(at(times, times.copy_in(0)), (HeadTail{5, 6}));
  EXPECT_EQ(at(times, ItemKind::kBackward, 1), (HeadTail{12, 0}));
  EXPECT_EQ(at(times, ItemKind::kWeightGrad, 0), (HeadTail{5, 0}));
  EXPECT_EQ(at(times, ItemKind::kRebuild, 0), (HeadTail{0, 6}));
  EXPECT_EQ(times.critical_path_ns(), 18);
}

TEST(PrecedenceTimes, WindowsAreEdges) {
  DualBatchInstance instance;
  instance.backward = {compute(1), compute(1), compute(1)};
  instance.weight_grads = {{10, 0}, {20, 1}};
  instance.weight_lag = 0;
  // None may be pending: W0 is over before B1, W1 before B2. 1 + 10 + 1 + 20 + 1 = 33.
  EXPECT_EQ(times_of(instance).critical_path_ns(), 33);
  instance.weight_lag = 1;  // W0 before B2: 1 + 10 + 20 behind each other, or 1 + 10 + 1
  EXPECT_EQ(times_of(instance).critical_path_ns(), 31);
  instance.weight_grads.clear();
  instance.rebuilds = {{5, 0}, {6, 1}, {7, 2}};
  instance.rebuild_lead = 1;
  // R0 B0 R1 B1 R2 B2 is forced: 5 + 1 + 6 + 1 + 7 + 1 = 21.
  EXPECT_EQ(times_of(instance).critical_path_ns(), 21);
  instance.rebuild_lead = 3;  // 5 + 6 + 7 on one stream, then B2
  EXPECT_EQ(times_of(instance).critical_path_ns(), 19);
}

TEST(PrecedenceTimes, APinnedOrderIsAPath) {
  DualBatchInstance instance;
  instance.forward = {comm(5), compute(1)};
  instance.backward = {comm(7), compute(2)};
  EXPECT_EQ(times_of(instance).critical_path_ns(), 9);
  EXPECT_FALSE(times_of(instance).comm_is_serial());
  instance.comm_order = {{ItemKind::kBackward, 0}, {ItemKind::kForward, 0}};
  EXPECT_EQ(times_of(instance).critical_path_ns(), 13);  // 7 + 5 + 1
  EXPECT_TRUE(times_of(instance).comm_is_serial());
}

TEST(PrecedenceTimes, RetimeEqualsBuild) {
  DualBatchInstance instance;
  instance.forward = {compute(3), comm(4)};
  instance.backward = {comm(5), compute(6)};
  instance.weight_grads = {{2, 1}};
  PrecedenceTimes times = times_of(instance);
  instance.forward[1].ns = 40;
  instance.weight_grads[0].ns = 9;
  times.retime(instance);
  const PrecedenceTimes fresh = times_of(instance);
  for (int node = 0; node < fresh.nodes(); ++node) EXPECT_EQ(at(times, node), at(fresh, node));
  EXPECT_EQ(times.critical_path_ns(), 43);
}

}  // namespace
}  // namespace bagualu
