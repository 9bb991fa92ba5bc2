// Contract of every policy, and the rules of those without foresight.
#include "bagualu/provision/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "bagualu/base/error.h"
#include "bagualu/provision/plan_cost.h"
#include "bagualu/provision/test_setup.h"

namespace bagualu {
namespace {

using ::testing::HasSubstr;

PolicyOptions options_for(const std::string& name) {
  PolicyOptions options;
  if (name == "selective") options.recompute_modules = {"core_attn", "moe_act"};
  return options;
}

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const InvalidInput& error) {
    return error.what();
  }
  return "no error";
}

class EveryPolicy : public ::testing::TestWithParam<std::string> {};

TEST_P(EveryPolicy, GivesTheSamePlansForTheSameMicrobatches) {
  const SmallModel setup({});
  const ProvisionContext context =
      setup.with_budget(std::max(setup.floor_bytes(), setup.save_all_bytes(1.2)));
  const auto one = make_policy(GetParam(), context, options_for(GetParam()));
  const auto two = make_policy(GetParam(), context, options_for(GetParam()));
  EXPECT_EQ(one->name(), GetParam());
  std::mt19937 random(5);
  drive_microbatch(context, *two, setup.even(3.0));  // another history
  for (int i = 0; i < 30; ++i) {
    const std::vector<LayerLoad> loads = random_routing(setup, random);
    const DrivenMicrobatch a = drive_microbatch(context, *one, loads);
    const DrivenMicrobatch b = drive_microbatch(context, *two, loads);
    ASSERT_EQ(a.decisions.size(), b.decisions.size());
    for (size_t g = 0; g < a.decisions.size(); ++g) {
      EXPECT_EQ(a.decisions[g].plan, b.decisions[g].plan) << i << " gate " << g;
    }
    EXPECT_EQ(a.timeline, b.timeline);
  }
}

TEST_P(EveryPolicy, DoesNotKnowTheLoadsOfLaterLayers) {
  const SmallModel setup({.layers = 4});
  const ProvisionContext context =
      setup.with_budget(std::max(setup.floor_bytes(), setup.save_all_bytes(1.1)));
  std::mt19937 random(6);
  for (int i = 0; i < 20; ++i) {
    const std::vector<LayerLoad> loads = random_routing(setup, random);
    std::vector<LayerLoad> other = random_routing(setup, random);
    const size_t same = random() % 4;
    std::copy_n(loads.begin(), same, other.begin());
    const auto one = make_policy(GetParam(), context, options_for(GetParam()));
    const auto two = make_policy(GetParam(), context, options_for(GetParam()));
    const DrivenMicrobatch a = drive_microbatch(context, *one, loads);
    const DrivenMicrobatch b = drive_microbatch(context, *two, other);
    for (size_t g = 0; g <= same; ++g) {  // decision g knows the loads of g layers
      EXPECT_EQ(a.decisions[g].plan, b.decisions[g].plan) << i << " gate " << g;
    }
  }
}

// Also of policies that do nothing up to some load and much above it.
TEST_P(EveryPolicy, SurvivesEveryLoadUpToItsLargestSurvivingFactor) {
  const SmallModel setup({.layers = 2});
  const PolicyOptions options = options_for(GetParam());
  const int64_t top = setup.save_all_bytes(4.0), least = setup.save_all_bytes(0.5);
  for (int step = 0; step <= 8; ++step) {
    const ProvisionContext context = setup.with_budget(least + (top - least) * step / 8);
    const double factor = largest_surviving_factor(GetParam(), context, options);
    for (double f = 0.1; f < factor; f += 0.1) {
      const std::vector<LayerLoad> loads = setup.even(f);
      const auto policy = make_policy(GetParam(), context, options);
      EXPECT_LE(drive_microbatch(context, *policy, loads).memory.peak_bytes,
                context.activation_budget_bytes)
          << step << " " << f << " of " << factor;
    }
  }
}

TEST_P(EveryPolicy, PredictsThePeakExactlyAtTheLastGate) {
  const SmallModel setup({.dense_first = true, .shared = true});
  const ProvisionContext context =
      setup.with_budget(std::max(setup.floor_bytes(), setup.save_all_bytes(1.2)));
  std::mt19937 random(7);
  const auto policy = make_policy(GetParam(), context, options_for(GetParam()));
  for (int i = 0; i < 50; ++i) {
    const DrivenMicrobatch run = drive_microbatch(context, *policy, random_routing(setup, random));
    EXPECT_EQ(run.decisions.back().predicted_peak_bytes, run.memory.peak_bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryPolicy, ::testing::ValuesIn(policy_names()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(Policy, UnknownNameListsTheKnownOnes) {
  const SmallModel setup({});
  EXPECT_THAT(
      message_of([&] { make_policy("best", setup.context, {}); }),
      testing::AllOf(HasSubstr("found best"), HasSubstr("save-all"), HasSubstr("adaptive")));
}

TEST(Policy, FullRecomputeOffloadsOnlyWhereThatIsNeeded) {
  const SmallModel setup({});
  const Plan full = uniform_plan(setup.graph, kRecompute);
  const std::vector<LayerLoad> worst(3, setup.context.worst_case);
  const int64_t peak = setup.peak(full, worst);
  const int64_t floor = setup.floor_bytes();
  ASSERT_LT(floor, peak);
  const ProvisionContext roomy = setup.with_budget(peak);
  const auto relaxed = make_policy("full-recompute", roomy, {});
  EXPECT_EQ(drive_microbatch(roomy, *relaxed, worst).decisions.back().plan, full);

  const ProvisionContext tight = setup.with_budget(floor);
  const auto pressed = make_policy("full-recompute", tight, {});
  const DrivenMicrobatch run = drive_microbatch(tight, *pressed, worst);
  EXPECT_LE(run.memory.peak_bytes, floor);
  const auto& last = run.decisions.back().plan.residency;
  EXPECT_GT(std::count(last.begin(), last.end(), kOffload), 0);
}

TEST(Policy, SelectiveRecomputesTheModulesOfTheList) {
  const SmallModel setup({});
  const auto policy =
      make_policy("selective", setup.context, {.recompute_modules = {"layernorm", "moe_experts"}});
  const Plan plan = drive_microbatch(setup.context, *policy, setup.even()).decisions[0].plan;
  for (size_t u = 0; u < setup.graph.units.size(); ++u) {
    const std::string& name = setup.graph.units[u].name;
    const bool listed = name.find("_norm") != std::string::npos && name != "final_norm";
    const bool experts =
        name.find("expert_fc1") != std::string::npos || name.find("moe_act") != std::string::npos;
    EXPECT_EQ(plan.residency[u], listed || experts ? kRecompute : kSave) << name;
  }
}

TEST(Policy, SelectiveRefusesWhatNamesNothing) {
  const SmallModel setup({});
  const auto refused = [&](std::vector<std::string> modules) {
    return message_of([&] {
      make_policy("selective", setup.context, {.recompute_modules = std::move(modules)});
    });
  };
  EXPECT_THAT(refused({"attention"}), HasSubstr("core_attn, moe_act, layernorm"));
  EXPECT_THAT(refused({"core_attn", "shared_experts"}), HasSubstr("found shared_experts"));
  EXPECT_THAT(refused({}), HasSubstr("an empty list"));
}

TEST(Policy, ThresholdDropsExpertIntermediatesOfTheHotLayerOnly) {
  const SmallModel setup({});
  std::vector<LayerLoad> loads = setup.even();
  loads[1] = scaled_load(setup.context.balanced, setup.context.worst_case, 2.5);
  const auto policy = make_policy("threshold", setup.context, {});
  const DrivenMicrobatch run = drive_microbatch(setup.context, *policy, loads);
  const Plan& plan = run.decisions.back().plan;
  for (size_t u = 0; u < setup.graph.units.size(); ++u) {
    const std::string& name = setup.graph.units[u].name;
    const bool hot = name == "layer1.expert_fc1" || name == "layer1.moe_act";
    EXPECT_EQ(plan.residency[u], hot ? kRecompute : kSave) << name;
  }
  EXPECT_TRUE(run.decisions[2].mitigated);
  EXPECT_FALSE(run.decisions[1].mitigated || run.decisions[3].mitigated);
  EXPECT_THAT(message_of([&] { make_policy("threshold", setup.context, {.threshold = 0.0}); }),
              HasSubstr("threshold"));
}

TEST(Policy, StaticTakesThePlanOfTheFile) {
  const SmallModel setup({});
  Plan plan = uniform_plan(setup.graph, kSave);
  plan.residency[setup.graph.find_unit("layer2.qkv")] = kOffload;
  plan.prefetch = false;
  const auto policy =
      make_policy("static", setup.context, {.plan = plan_to_json(setup.graph, plan)});
  const DrivenMicrobatch run = drive_microbatch(setup.context, *policy, setup.even(4.0));
  for (const Decision& decision : run.decisions) EXPECT_EQ(decision.plan, plan);
  const Json unknown = Json::parse(R"({"version":1,"units":{"layer9.qkv":"save"}})");
  EXPECT_THAT(message_of([&] { make_policy("static", setup.context, {.plan = unknown}); }),
              HasSubstr("layer9.qkv"));
}

TEST(Policy, StaticFitsOnceToItsLoadAndDiesAboveIt) {
  const SmallModel setup({});
  const int64_t budget = setup.save_all_bytes(1.2);
  const ProvisionContext light = setup.with_budget(budget);
  const auto saves = make_policy("static", light, {});
  EXPECT_EQ(drive_microbatch(light, *saves, setup.even()).decisions[0].plan,
            uniform_plan(setup.graph, kSave));
  const DrivenMicrobatch spike = drive_microbatch(light, *saves, setup.even(2.6));
  EXPECT_GT(spike.memory.peak_bytes, budget);
  EXPECT_FALSE(spike.decisions.back().feasible);
  EXPECT_EQ(spike.decisions.back().short_by_bytes, spike.memory.peak_bytes - budget);

  const auto heavier = make_policy("static", light, {.static_fit_imbalance = 2.0});
  const DrivenMicrobatch fitted = drive_microbatch(light, *heavier, setup.even(2.0));
  EXPECT_LE(fitted.memory.peak_bytes, budget);
  EXPECT_GT(fitted.decisions[0].exposed_ns, 0);
  EXPECT_THAT(message_of([&] { make_policy("static", light, {.static_fit_imbalance = -1.0}); }),
              HasSubstr("static_fit_imbalance"));
}

TEST(PlanCost, WaitedForCopiesAreChargedInFull) {
  const SmallModel setup({.copy_hidden_fraction = 0.5});
  const int unit = setup.graph.find_unit("layer0.qkv");
  // 64 tokens x (64 + 2 * 32) x 4 bytes = 32 KiB at 4 GB/s: 8192 ns each way, half of it hidden.
  const auto cost = [&](bool drains_now, bool prefetch) {
    return unit_cost_ns(setup.context, setup.even(), unit, kOffload, drains_now, prefetch);
  };
  EXPECT_EQ(cost(false, true), 8192);
  EXPECT_EQ(cost(true, true), 8192 + 4096);
  EXPECT_EQ(cost(true, false), 8192 + 8192);
  EXPECT_EQ(unit_cost_ns(setup.context, setup.even(), unit, kSave, true, false), 0);
}

}  // namespace
}  // namespace bagualu
