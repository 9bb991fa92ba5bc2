// The solver against every order, on small random instances.
#include <gtest/gtest.h>

#include <random>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/schedule/dual_batch_reference.h"
#include "bagualu/schedule/verify_schedule.h"

namespace bagualu {
namespace {

constexpr int kInstances = 10'000;

struct KindCase {
  SmallKind kind;
  bool pinned;
  uint64_t seed;
};

class SmallInstance : public testing::TestWithParam<KindCase> {};

// The eight kinds together are kInstances.
TEST_P(SmallInstance, ExactSearchEqualsEveryOrder) {
  const auto& [kind, pinned, seed] = GetParam();
  SmallInstances instances(seed);
  SolveOptions exact;
  exact.tolerance_ppm = 0;
  SolveOptions quick;
  quick.exact = false;
  quick.beam = 2;
  for (int i = 0; i < kInstances / 8; ++i) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", instance " << i);
    const DualBatchInstance instance = instances.next(kind, pinned);
    EveryOrder every(instance);
    const int64_t optimum_ns = every.optimum_ns();
    ASSERT_EQ(verify_schedule(instance, every.order(), optimum_ns), std::vector<std::string>());
    const DualBatchSchedule best = solve(instance, exact);
    ASSERT_EQ(best.makespan_ns, optimum_ns);
    ASSERT_EQ(best.bound_ns, optimum_ns);
    ASSERT_EQ(verify_schedule(instance, best), std::vector<std::string>());
    ASSERT_EQ(verify_replay(instance, best.order, replay(instance, best.order)),
              std::vector<std::string>());
    const DualBatchSchedule first = solve(instance, quick);
    ASSERT_LE(first.bound_ns, optimum_ns);
    ASSERT_EQ(verify_schedule(instance, first), std::vector<std::string>());
  }
}

// An order with one item elsewhere, twice or missing.
std::vector<ScheduleItem> spoiled(std::vector<ScheduleItem> order, std::mt19937_64& random) {
  const auto place = [&] { return static_cast<int64_t>(random() % order.size()); };
  const auto from = order.begin() + place();
  const ScheduleItem item = *from;
  const uint64_t how = random() % 6;
  if (how > 0) order.erase(from);
  if (how < 5 && !order.empty()) order.insert(order.begin() + place(), item);
  return order;
}

// Two pieces of code that share nothing say the same of orders that may be wrong.
TEST_P(SmallInstance, VerifierAndReplayAgreeOnSpoiledOrders) {
  const auto& [kind, pinned, seed] = GetParam();
  SmallInstances instances(seed + 100);
  std::mt19937_64 random(seed);
  int accepted = 0, refused = 0;
  for (int i = 0; i < 300; ++i) {
    const DualBatchInstance instance = instances.next(kind, pinned);
    const std::vector<ScheduleItem> order = solve(instance).order;
    if (order.size() < 2) continue;
    for (int change = 0; change < 4; ++change) {
      const std::vector<ScheduleItem> other = spoiled(order, random);
      bool replays = true;
      DualBatchReplay times;
      try {
        times = replay(instance, other);
      } catch (const InternalError&) {
        replays = false;
      }
      const auto found = replays ? verify_replay(instance, other, times)
                                 : verify_schedule(instance, other, 1'000'000'000);
      const auto wrong = std::count_if(found.begin(), found.end(), [](const std::string& line) {
        return line.find("makespan") == std::string::npos;
      });
      ASSERT_EQ(replays, wrong == 0) << "seed " << seed << ", instance " << i << ": "
                                     << (found.empty() ? "accepted" : found[0]);
      ASSERT_TRUE(!replays || found.empty()) << found[0];
      ++(replays ? accepted : refused);
    }
  }
  EXPECT_GT(accepted, 20);
  EXPECT_GT(refused, 200);
}

const KindCase kKinds[] = {{SmallKind::kAnyChains, false, 1},   {SmallKind::kAnyChains, true, 2},
                           {SmallKind::kAlternating, false, 3}, {SmallKind::kAlternating, true, 4},
                           {SmallKind::kFillers, false, 5},     {SmallKind::kFillers, true, 6},
                           {SmallKind::kEverything, false, 7},  {SmallKind::kEverything, true, 8}};

std::string kind_name(const testing::TestParamInfo<KindCase>& info) {
  static const char* const kNames[kSmallKinds] = {"AnyChains", "Alternating", "Fillers",
                                                  "Everything"};
  return std::string(kNames[static_cast<int>(info.param.kind)]) +
         (info.param.pinned ? "Pinned" : "");
}

INSTANTIATE_TEST_SUITE_P(Kinds, SmallInstance, testing::ValuesIn(kKinds), kind_name);

}  // namespace
}  // namespace bagualu
