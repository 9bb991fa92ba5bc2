#include "bagualu/schedule/verify_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace bagualu {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr ScheduleItem f(int index) { return {ItemKind::kForward, index}; }
constexpr ScheduleItem b(int index) { return {ItemKind::kBackward, index}; }
constexpr ScheduleItem w(int index) { return {ItemKind::kWeightGrad, index}; }
constexpr ScheduleItem r(int index) { return {ItemKind::kRebuild, index}; }

constexpr Resource kOn[2] = {Resource::kCompute, Resource::kComm};

// Forward: attention 3, dispatch 2, expert 2. Backward: combine 2, expert 4, dispatch 2, attention
// 3, with weight gradients of 2 and 1 and rebuilds of 1 and 1. One offload of 4 from attention that
// the expert waits for; a reload of 5 for the last backward operator, behind the first.
DualBatchInstance layer_pair() {
  DualBatchInstance in;
  in.forward = {{3, kOn[0]}, {2, kOn[1]}, {2, kOn[0]}};
  in.backward = {{2, kOn[1]}, {4, kOn[0]}, {2, kOn[1]}, {3, kOn[0]}};
  in.weight_grads = {{2, 1}, {1, 3}};
  in.rebuilds = {{1, 1}, {1, 3}};
  in.copies_out = {{4, 0, 2}};
  in.copies_in = {{5, 3, 1, 0}};
  in.weight_lag = 1;
  in.rebuild_lead = 1;
  return in;
}

// compute  F0 0-3, R0 3-4, B1 4-8, W0 8-10, R1 10-11 (reload 2-7), F2 11-13, B3 13-16, W1 16-17
// comm     B0 0-2, F1 3-5, B2 8-10;  offload 3-7
const std::vector<ScheduleItem> kGood = {b(0), f(0), r(0), f(1), b(1), b(2),
                                         w(0), r(1), f(2), b(3), w(1)};
constexpr int64_t kGoodNs = 17;

TEST(VerifySchedule, AcceptsAnOrderCountedByHand) {
  check_instance(layer_pair());
  EXPECT_THAT(verify_schedule(layer_pair(), kGood, kGoodNs), IsEmpty());
  const DualBatchReplay times = replay(layer_pair(), kGood);
  EXPECT_EQ(times.rebuilds[1], (TimeSpan{10, 11}));
  EXPECT_THAT(verify_replay(layer_pair(), kGood, times), IsEmpty());
}

TEST(VerifySchedule, AcceptsNothingForNothing) {
  EXPECT_THAT(verify_schedule({}, {}, 0), IsEmpty());
  EXPECT_THAT(verify_schedule({}, {}, 1), ElementsAre("the makespan is 0 ns, claimed 1"));
}

TEST(VerifySchedule, FindsAWrongMakespan) {
  EXPECT_THAT(verify_schedule(layer_pair(), kGood, 16),
              Contains("the makespan is 17 ns, claimed 16"));
  // Compute: 3 + 2 + 4 + 3 + 2 + 1 + 1 + 1 = 17.
  EXPECT_THAT(verify_schedule(layer_pair(), kGood, 16),
              Contains("a makespan of 16 ns is less than the load of compute, 17 ns"));
  // Backward with the reload and its rebuild: combine 2, reload 5, rebuild 1, attention 3 = 11;
  // with the rebuild, expert and dispatch: 2, 4, 2, 3 = 11; then the weight gradient of 1.
  EXPECT_THAT(verify_schedule(layer_pair(), kGood, 11),
              Contains(HasSubstr("less than the longest path to weight gradient 1, 12 ns")));
}

TEST(VerifySchedule, FindsABoundAboveTheMakespan) {
  DualBatchSchedule schedule;
  schedule.order = kGood;
  schedule.makespan_ns = schedule.bound_ns = kGoodNs;
  EXPECT_THAT(verify_schedule(layer_pair(), schedule), IsEmpty());
  schedule.bound_ns = 18;
  EXPECT_THAT(verify_schedule(layer_pair(), schedule),
              ElementsAre("the bound of 18 ns is above the makespan, 17 ns"));
}

std::vector<ScheduleItem> moved(std::vector<ScheduleItem> order, size_t from, size_t to) {
  const ScheduleItem item = order[from];
  order.erase(order.begin() + static_cast<int64_t>(from));
  order.insert(order.begin() + static_cast<int64_t>(to), item);
  return order;
}

std::vector<std::string> found(const std::vector<ScheduleItem>& order,
                               const DualBatchInstance& in = layer_pair()) {
  return verify_schedule(in, order, kGoodNs);
}

TEST(VerifySchedule, FindsMissingDoubleAndUnknownItems) {
  auto order = kGood;
  order.pop_back();
  EXPECT_THAT(found(order), Contains("weight gradient 1 is never issued"));
  order = kGood;
  order.push_back(f(2));
  EXPECT_THAT(found(order), ElementsAre("forward 2 is issued twice"));
  order = kGood;
  order.push_back(r(2));
  EXPECT_THAT(found(order), ElementsAre("no such item: kind 3, index 2"));
  order.back() = f(-1);
  EXPECT_THAT(found(order), ElementsAre("no such item: kind 0, index -1"));
}

TEST(VerifySchedule, FindsAChainOutOfOrder) {
  EXPECT_THAT(found(moved(kGood, 3, 0)), Contains("forward 1 is issued before forward 0"));
  EXPECT_THAT(found(moved(kGood, 5, 4)), Contains("backward 2 is issued before backward 1"));
}

TEST(VerifySchedule, FindsFillersOutOfOrder) {
  DualBatchInstance in = layer_pair();
  in.weight_lag = 2;
  EXPECT_THAT(found(moved(kGood, 6, 10), in),
              Contains("weight gradient 1 is issued before weight gradient 0"));
  in.rebuild_lead = 2;
  EXPECT_THAT(found(moved(kGood, 7, 2), in), Contains("rebuild 1 is issued before rebuild 0"));
}

TEST(VerifySchedule, FindsAnItemBeforeWhatItNeeds) {
  EXPECT_THAT(found(moved(kGood, 6, 4)),
              Contains("weight gradient 0 is issued before backward 1, which it needs"));
  EXPECT_THAT(found(moved(kGood, 2, 4)),
              Contains("backward 1 is issued before rebuild 0, which it needs"));
  // The reload waits for backward 0 to free its buffer, the rebuild for the reload.
  DualBatchInstance in = layer_pair();
  in.rebuild_lead = 2;
  std::vector<ScheduleItem> order = {f(0), r(0), r(1), b(0), f(1), b(1),
                                     b(2), w(0), f(2), b(3), w(1)};
  EXPECT_THAT(found(order, in), Contains("rebuild 1 is issued before copy in 0, which it needs"));
}

TEST(VerifySchedule, FindsWeightGradientsThatLagTooFar) {
  DualBatchInstance in = layer_pair();
  in.weight_lag = 0;
  EXPECT_THAT(found(kGood, in),
              Contains("backward 2 is issued while 1 weight gradients are pending, at most 0"));
  EXPECT_THAT(verify_schedule(in, moved(kGood, 6, 5), kGoodNs), IsEmpty());
  in.weight_lag = 1;
  in.weight_grads = {{1, 1}, {1, 1}, {1, 3}};
  const std::vector<ScheduleItem> order = {b(0), f(0), r(0), f(1), b(1), b(2),
                                           w(0), w(1), r(1), f(2), b(3), w(2)};
  EXPECT_THAT(found(order, in),
              ElementsAre("backward 2 is issued while 2 weight gradients are pending, at most 1"));
}

TEST(VerifySchedule, FindsRebuildsThatLeadTooFar) {
  DualBatchInstance in = layer_pair();
  in.copies_in[0].wanted_by_rebuild = -1;
  const auto early = moved(kGood, 7, 3);  // rebuild 1 while rebuild 0 waits for backward 1
  EXPECT_THAT(found(early, in),
              ElementsAre("rebuild 1 is issued while 1 rebuilds lead, at most 1"));
  in.rebuild_lead = 2;
  EXPECT_THAT(found(early, in), IsEmpty());
  // With no lead at all a rebuild is still allowed for the very next backward operator.
  in.rebuild_lead = 0;
  EXPECT_THAT(found(kGood, in), IsEmpty());
  EXPECT_THAT(found(moved(kGood, 7, 5), in),
              ElementsAre("rebuild 1 is issued while 0 rebuilds lead, at most 0"));
}

TEST(VerifySchedule, FindsAHostThatWaitsForWhatItHasNotIssued) {
  DualBatchInstance in = layer_pair();
  in.backward[1].host_sync = true;
  EXPECT_THAT(
      found(moved(kGood, 2, 4), in),
      Contains("backward 1 is issued before rebuild 0, which it needs: the host waits for ever"));
  EXPECT_THAT(found(moved(kGood, 2, 4), in), Contains("the host waits for ever for backward 1"));
}

TEST(VerifySchedule, NothingIssuedBehindAHostSyncStartsBeforeItsEnd) {
  DualBatchInstance in;
  in.forward = {{2, kOn[0]}, {3, kOn[1], true}};
  in.backward = {{4, kOn[0]}};
  // Issued last, the backward starts at 5 though the stream is free from 2 on.
  EXPECT_THAT(verify_schedule(in, {f(0), f(1), b(0)}, 9), IsEmpty());
  EXPECT_THAT(verify_schedule(in, {f(0), b(0), f(1)}, 6), IsEmpty());
  DualBatchReplay early = replay(in, {f(0), b(0), f(1)});
  early.makespan_ns = 9;
  EXPECT_THAT(verify_replay(in, {f(0), f(1), b(0)}, early),
              ElementsAre("backward 0 runs from 5 to 9 ns, claimed 2 to 6"));
}

TEST(VerifySchedule, FindsCommunicationAgainstThePinnedOrder) {
  DualBatchInstance in = layer_pair();
  in.comm_order = {b(0), f(1), b(2)};
  EXPECT_THAT(found(kGood, in), IsEmpty());
  in.comm_order = {f(1), b(0), b(2)};
  EXPECT_THAT(found(kGood, in),
              ElementsAre("backward 0 is issued where forward 1 is the next communication",
                          "forward 1 is issued where backward 0 is the next communication"));
}

TEST(VerifySchedule, FindsTimesThatAreNotTheMachines) {
  DualBatchReplay times = replay(layer_pair(), kGood);
  times.weight_grads[0] = {7, 9};
  EXPECT_THAT(verify_replay(layer_pair(), kGood, times),
              ElementsAre("backward 1 and weight gradient 0 run at the same time",
                          "weight gradient 0 runs from 8 to 10 ns, claimed 7 to 9"));
  times = replay(layer_pair(), kGood);
  times.copies_in[0] = {0, 5};
  EXPECT_THAT(verify_replay(layer_pair(), kGood, times),
              ElementsAre("copy in 0 runs from 2 to 7 ns, claimed 0 to 5"));
  times.copies_in.clear();
  EXPECT_THAT(verify_replay(layer_pair(), kGood, times),
              ElementsAre("12 times for 13 items and copies"));
}

}  // namespace
}  // namespace bagualu
