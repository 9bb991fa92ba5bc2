#include "bagualu/schedule/dual_batch_families.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "bagualu/schedule/dual_batch_greedy.h"
#include "bagualu/schedule/verify_schedule.h"

namespace bagualu {
namespace {

constexpr int kInstances = 8;

class EveryFamily : public testing::TestWithParam<Family> {};

TEST_P(EveryFamily, SchedulesHoldAndAreNoWorseThanHandMadeOnes) {
  for (const bool pinned : {false, true}) {
    std::mt19937_64 random(11);
    for (int i = 0; i < kInstances; ++i) {
      SCOPED_TRACE(testing::Message() << "instance " << i << (pinned ? ", pinned" : ""));
      const DualBatchInstance instance = family_instance(GetParam(), pinned, random);
      const DualBatchSchedule schedule = solve(instance);
      EXPECT_EQ(verify_schedule(instance, schedule), std::vector<std::string>());
      EXPECT_EQ(verify_replay(instance, schedule.order, replay(instance, schedule.order)),
                std::vector<std::string>());
      for (const auto& order : {fixed_order(instance), greedy_order(instance)}) {
        const DualBatchReplay times = replay(instance, order);
        EXPECT_EQ(verify_replay(instance, order, times), std::vector<std::string>());
        EXPECT_LE(schedule.makespan_ns, times.makespan_ns);
        EXPECT_LE(schedule.bound_ns, times.makespan_ns);
      }
    }
  }
}

// The product pins communication, so that is what is measured.
TEST_P(EveryFamily, OverlapIsWorthAtLeastTwoFifths) {
  std::mt19937_64 random(12);
  double ratio = 0;
  for (int i = 0; i < kInstances; ++i) {
    const DualBatchInstance instance = family_instance(GetParam(), true, random);
    ratio += static_cast<double>(no_overlap_ns(instance)) /
             static_cast<double>(solve(instance).makespan_ns);
  }
  EXPECT_GE(ratio / kInstances, 1.4);
}

std::string test_name(const testing::TestParamInfo<Family>& info) {
  std::string name = family_name(info.param);
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Families, EveryFamily, testing::ValuesIn(all_families()), test_name);

TEST(DualBatchFamilies, GapsToTheBoundAreSmall) {
  double sum = 0, largest = 0;
  int count = 0;
  for (const Family& family : all_families()) {
    std::mt19937_64 random(13);
    for (int i = 0; i < kInstances; ++i, ++count) {
      const double gap = solve(family_instance(family, true, random)).gap_fraction();
      sum += gap;
      largest = std::max(largest, gap);
    }
  }
  EXPECT_LE(sum / count, 0.003);
  EXPECT_LE(largest, 0.01);
}

TEST(DualBatchFamilies, TimesAreThoseOfTheTrace) {
  // Compute of a pair of layers of DeepSeek-V3: forward 4.45 + 4.1, backward 5.4 + 5.1 + 9.6 + 2.4
  // = 31.05 ms; communication 4.3 + 6.1 + 3.6 + 6.5 = 20.5 ms. Noise is symmetric, so the mean of
  // 400 layer pairs is within 2 %.
  std::mt19937_64 random(14);
  double compute = 0, comm = 0;
  const auto add = [&](const std::vector<ChainOp>& chain) {
    for (const ChainOp& op : chain) (op.resource == Resource::kComm ? comm : compute) += op.ns;
  };
  for (int i = 0; i < 100; ++i) {
    const auto in =
        family_instance({FamilyTimes::kDeepSeekV3, FamilyKind::kBalanced, 4}, false, random);
    add(in.forward);
    add(in.backward);
    for (const WeightGradFiller& grad : in.weight_grads) compute += grad.ns;
  }
  EXPECT_NEAR(compute / 400, 31.05e6, 0.02 * 31.05e6);
  EXPECT_NEAR(comm / 400, 20.5e6, 0.02 * 20.5e6);
}

TEST(DualBatchFamilies, EqualGeneratorsGiveEqualInstances) {
  for (const Family& family : all_families()) {
    std::mt19937_64 a(15), b(15);
    EXPECT_EQ(family_instance(family, true, a), family_instance(family, true, b));
  }
}

TEST(DualBatchFamilies, NoOverlapIsTheSumOfEverything) {
  // Forward 3 + 2, backward 4 + 1, weight gradient 2, rebuild 1: 13, and the reload of 9 that the
  // last backward operator (1) waits for: backward first 9 + 1 + 2, forward 5: 17; forward first
  // 5, 4, rebuild: 10, 1 + 2: 13.
  DualBatchInstance in;
  in.forward = {{3, Resource::kCompute}, {2, Resource::kComm}};
  in.backward = {{4, Resource::kComm}, {1, Resource::kCompute}};
  in.weight_grads = {{2, 1}};
  in.rebuilds = {{1, 1}};
  in.copies_in = {{9, 1, -1, -1}};
  EXPECT_EQ(no_overlap_ns(in), 13);
}

// Proven by HiGHS on a model that shares no code with the solver: bench/dual_batch_milp.py.
TEST(DualBatchFamilies, ExactAnswersAreTheOptimaOfAMilp) {
  const Json optima =
      read_json_file(std::string(BAGUALU_SOURCE_DIR) + "/tests/data/dual_batch_milp.json");
  EXPECT_GE(optima.size(), 50u);
  SolveOptions exact;
  exact.tolerance_ppm = 0;
  for (const auto& [number, optimum_ns] : optima.items()) {
    const DualBatchSchedule schedule = solve(milp_instance(std::stoll(number)), exact);
    EXPECT_EQ(schedule.makespan_ns, optimum_ns.get<int64_t>()) << "instance " << number;
    EXPECT_EQ(schedule.bound_ns, schedule.makespan_ns) << "instance " << number;
  }
}

TEST(DualBatchFamilies, ADeadlineReturnsACertifiedOrder) {
  std::mt19937_64 random(16);
  SolveOptions options;
  options.tolerance_ppm = 0;
  options.deadline_ns = 1;  // over at once
  for (int i = 0; i < kInstances; ++i) {
    const auto instance =
        family_instance({FamilyTimes::kDeepSeekV3, FamilyKind::kHostSync, 8}, false, random);
    const DualBatchSchedule schedule = solve(instance, options);
    EXPECT_EQ(verify_schedule(instance, schedule), std::vector<std::string>());
    EXPECT_LE(schedule.makespan_ns, replay(instance, greedy_order(instance)).makespan_ns);
    EXPECT_GT(schedule.bound_ns, 0);
  }
}

}  // namespace
}  // namespace bagualu
