#include "bagualu/schedule/dual_batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

using ::testing::ElementsAre;

std::string text(const std::vector<ScheduleItem>& order) {
  std::string line;
  for (const ScheduleItem& item : order) {
    line += (line.empty() ? "" : " ") + std::string(1, "FBWR"[static_cast<int>(item.kind)]) +
            std::to_string(item.index);
  }
  return line;
}

ChainOp compute(int64_t ns, int layer = 0) { return {ns, Resource::kCompute, false, layer}; }
ChainOp comm(int64_t ns, int layer = 0) { return {ns, Resource::kComm, false, layer}; }

// `layers` MoE layers: attention, dispatch, experts, combine; the backward the other way round.
DualBatchInstance moe_layers(int forward_layers, int backward_layers) {
  DualBatchInstance instance;
  for (int layer = 0; layer < forward_layers; ++layer) {
    instance.forward.insert(instance.forward.end(), {compute(15, layer), comm(9, layer),
                                                     compute(12, layer), comm(9, layer)});
  }
  for (int layer = backward_layers; layer-- > 0;) {
    instance.backward.insert(instance.backward.end(), {comm(9, layer), compute(24, layer),
                                                       comm(9, layer), compute(30, layer)});
  }
  return instance;
}

TEST(PinnedCommOrder, TakesCombineDispatchDispatchCombinePerLayerPair) {
  EXPECT_EQ(text(pinned_comm_order(moe_layers(2, 2))), "B0 F1 B2 F3 B4 F5 B6 F7");
}

TEST(PinnedCommOrder, EndsTheLongerChainAlone) {
  EXPECT_EQ(text(pinned_comm_order(moe_layers(2, 1))), "B0 F1 B2 F3 F5 F7");
  EXPECT_EQ(text(pinned_comm_order(moe_layers(0, 2))), "B0 B2 B4 B6");
  EXPECT_EQ(text(pinned_comm_order(moe_layers(1, 0))), "F1 F3");
  EXPECT_EQ(text(pinned_comm_order(moe_layers(0, 0))), "");
}

TEST(PinnedCommOrder, KeepsCountsBesideTheDispatch) {
  DualBatchInstance instance = moe_layers(1, 1);
  instance.forward.insert(instance.forward.begin() + 1, comm(1));
  EXPECT_EQ(text(pinned_comm_order(instance)), "B0 F1 F2 B2 F4");
}

TEST(PinnedCommOrder, DoesNotDependOnDurations) {
  DualBatchInstance instance = moe_layers(3, 3);
  const auto order = pinned_comm_order(instance);
  for (ChainOp& op : instance.forward) op.ns *= 100;
  EXPECT_EQ(pinned_comm_order(instance), order);
}

TEST(DualBatchReplay, StartsEverythingAsSoonAsStreamsAndInputsAllow) {
  DualBatchInstance instance = moe_layers(1, 1);
  instance.weight_grads = {{6, 1}};
  // Compute: F0 0-15, B1 15-39 (B0 ended at 9), W0 39-45, F2 45-57 (F1 15-24), B3 57-87 (B2 39-48).
  // Comm: B0 0-9, F1 15-24, B2 39-48, F3 57-66.
  const auto order = fixed_order(instance);
  EXPECT_EQ(text(order), "B0 F0 F1 B1 W0 B2 F2 F3 B3");
  const DualBatchReplay result = replay(instance, order);
  EXPECT_THAT(result.forward,
              ElementsAre(TimeSpan{0, 15}, TimeSpan{15, 24}, TimeSpan{45, 57}, TimeSpan{57, 66}));
  EXPECT_THAT(result.backward,
              ElementsAre(TimeSpan{0, 9}, TimeSpan{15, 39}, TimeSpan{39, 48}, TimeSpan{57, 87}));
  EXPECT_THAT(result.weight_grads, ElementsAre(TimeSpan{39, 45}));
  EXPECT_EQ(result.makespan_ns, 87);
}

TEST(DualBatchReplay, HoldsWhatIsIssuedBehindAHostSync) {
  DualBatchInstance instance;
  instance.forward = {comm(10)};
  instance.forward[0].host_sync = true;
  instance.backward = {compute(4)};
  const ScheduleItem f{ItemKind::kForward, 0};
  const ScheduleItem b{ItemKind::kBackward, 0};
  EXPECT_EQ(replay(instance, {f, b}).backward[0].start_ns, 10);
  EXPECT_EQ(replay(instance, {b, f}).backward[0].start_ns, 0);
}

TEST(DualBatchReplay, RunsCopiesOnTheirEnginesAndWaitsForThem) {
  DualBatchInstance instance;
  instance.forward = {compute(2), compute(2), compute(2)};
  instance.backward = {compute(3), compute(3)};
  instance.copies_out = {{7, 0, 2}};
  instance.copies_in = {{4, 0, -1, -1}, {5, 1, -1, 0}};
  // Out: F0 0-2, copy 2-9, F2 waits until 9. In: copy 0-4, B0 4-7, copy 7-12, B1 12-15.
  const DualBatchReplay result = replay(instance, {{ItemKind::kForward, 0},
                                                   {ItemKind::kForward, 1},
                                                   {ItemKind::kBackward, 0},
                                                   {ItemKind::kForward, 2},
                                                   {ItemKind::kBackward, 1}});
  EXPECT_THAT(result.copies_out, ElementsAre(TimeSpan{2, 9}));
  EXPECT_THAT(result.copies_in, ElementsAre(TimeSpan{0, 4}, TimeSpan{7, 12}));
  EXPECT_EQ(result.forward[2].start_ns, 9);
  EXPECT_EQ(result.backward[0].start_ns, 4);
  EXPECT_EQ(result.backward[1].start_ns, 12);
  EXPECT_EQ(result.makespan_ns, 15);
}

TEST(DualBatchReplay, RefusesAnOrderThatIsNone) {
  DualBatchInstance instance = moe_layers(1, 1);
  instance.weight_grads = {{6, 1}};
  instance.weight_lag = 0;
  auto order = fixed_order(instance);
  std::swap(order[4], order[5]);  // B2 while W0 is pending, of which none may be
  EXPECT_THROW(replay(instance, order), InternalError);
  order.resize(3);
  EXPECT_THROW(replay(instance, order), InternalError);
  instance.comm_order = pinned_comm_order(instance);
  EXPECT_THROW(replay(instance, {{ItemKind::kForward, 0}, {ItemKind::kForward, 1}}), InternalError);
}

TEST(DualBatchReplay, RefusesRebuildsBeyondTheirLead) {
  DualBatchInstance instance;
  instance.backward = {compute(3), compute(3), compute(3)};
  instance.rebuilds = {{1, 0}, {1, 1}, {1, 2}};
  instance.rebuild_lead = 2;
  const ScheduleItem r0{ItemKind::kRebuild, 0};
  const ScheduleItem r1{ItemKind::kRebuild, 1};
  const ScheduleItem r2{ItemKind::kRebuild, 2};
  const ScheduleItem b0{ItemKind::kBackward, 0};
  const ScheduleItem b1{ItemKind::kBackward, 1};
  const ScheduleItem b2{ItemKind::kBackward, 2};
  EXPECT_EQ(replay(instance, {r0, r1, b0, r2, b1, b2}).makespan_ns, 12);
  EXPECT_THROW(replay(instance, {r0, r1, r2, b0, b1, b2}), InternalError);
}

TEST(CheckInstance, RefusesContradictions) {
  DualBatchInstance instance = moe_layers(1, 1);
  EXPECT_NO_THROW(check_instance(instance));
  instance.weight_grads = {{1, 4}};
  EXPECT_THROW(check_instance(instance), InternalError);
  instance.weight_grads = {{1, 3}, {1, 1}};
  EXPECT_THROW(check_instance(instance), InternalError);
  instance = moe_layers(1, 1);
  instance.copies_in = {{1, 1, -1, 1}};  // frees its buffer by the operator that waits for it
  EXPECT_THROW(check_instance(instance), InternalError);
  instance = moe_layers(1, 1);
  instance.comm_order = {{ItemKind::kForward, 1}};
  EXPECT_THROW(check_instance(instance), InternalError);
}

TEST(Solve, KeepsTheBetterOfFixedAndGreedy) {
  for (int forward = 0; forward <= 3; ++forward) {
    for (int backward = 0; backward <= 3; ++backward) {
      DualBatchInstance instance = moe_layers(forward, backward);
      instance.comm_order = pinned_comm_order(instance);
      const DualBatchSchedule schedule = solve(instance);
      EXPECT_EQ(replay(instance, schedule.order).makespan_ns, schedule.makespan_ns);
      EXPECT_LE(schedule.makespan_ns, replay(instance, fixed_order(instance)).makespan_ns);
      EXPECT_GE(schedule.makespan_ns, schedule.bound_ns);
    }
  }
}

}  // namespace
}  // namespace bagualu
