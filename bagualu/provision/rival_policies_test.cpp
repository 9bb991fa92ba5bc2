// The rules of the policies that stand for other systems: adapipe, kwai, retry.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "bagualu/base/error.h"
#include "bagualu/cost/megatron_cost.h"
#include "bagualu/graph/megatron_moe.h"
#include "bagualu/provision/plan_cost.h"
#include "bagualu/provision/policy.h"
#include "bagualu/provision/test_setup.h"

namespace bagualu {
namespace {

using ::testing::HasSubstr;

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const InvalidInput& error) {
    return error.what();
  }
  return "no error";
}

Plan first_plan(const char* policy, const SmallModel& setup, const ProvisionContext& context,
                const PolicyOptions& options = {}) {
  const auto made = make_policy(policy, context, options);
  return drive_microbatch(context, *made, setup.even()).decisions.front().plan;
}

int64_t unit_bytes(const SmallModel& setup, size_t unit, double factor) {
  const std::vector<int64_t> bytes = setup.graph.storage_bytes(setup.even(factor));
  int64_t sum = 0;
  for (int s : setup.graph.units[unit].storages) sum += bytes[static_cast<size_t>(s)];
  return sum;
}

int64_t cost_of(const SmallModel& setup, const Plan& plan, double factor) {
  return plan_cost_ns(setup.context, setup.even(factor), initial_state(setup.graph), plan);
}

// Live bytes between forward and backward.
int64_t carried_bytes(const SmallModel& setup, const Plan& plan, double factor) {
  MicrobatchState state = initial_state(setup.graph);
  Timeline forward;
  while (append_forward(setup.graph, plan, state, forward) >= 0) {
  }
  MemoryReplay replay;
  replay_memory(setup.graph, plan, memory_table(setup.graph, setup.even(factor)), forward, 0,
                replay);
  return replay.live_bytes;
}

TEST(AdaPipe, SavesEverythingWhereThatFitsAtItsLoad) {
  const SmallModel setup({});
  const ProvisionContext context = setup.with_budget(setup.save_all_bytes(1.2));
  EXPECT_EQ(first_plan("adapipe", setup, context), uniform_plan(setup.graph, kSave));
  EXPECT_EQ(first_plan("adapipe", setup, setup.context), uniform_plan(setup.graph, kSave));
}

TEST(AdaPipe, NeverExceedsTheBudgetAtItsLoadAndOnlyRecomputes) {
  for (const CaseOptions& options :
       {CaseOptions{}, CaseOptions{.layers = 4, .dense_first = true, .shared = true}}) {
    const SmallModel setup(options);
    const Plan full = uniform_plan(setup.graph, kRecompute);
    for (const double factor : {1.2, 2.0}) {
      const int64_t least = setup.peak(full, setup.even(factor));
      const int64_t most = setup.save_all_bytes(factor);
      ASSERT_LT(least, most);
      for (int64_t budget = least; budget < most; budget += (most - least) / 23) {
        const Plan plan = first_plan("adapipe", setup, setup.with_budget(budget),
                                     {.adapipe_fit_imbalance = factor});
        ASSERT_LE(setup.peak(plan, setup.even(factor)), budget);
        ASSERT_LE(setup.peak(plan, setup.even(1.0)), budget);
        EXPECT_EQ(std::count(plan.residency.begin(), plan.residency.end(), kOffload), 0);
      }
    }
  }
}

TEST(AdaPipe, NoSetOfUnitsThatHoldsAsManyBytesCostsLess) {
  const SmallModel setup({.layers = 1});
  const Plan full = uniform_plan(setup.graph, kRecompute);
  std::vector<size_t> free;
  for (size_t u = 0; u < full.residency.size(); ++u) {
    if (full.residency[u] == kRecompute) free.push_back(u);
  }
  ASSERT_LE(free.size(), 12U);
  struct Choice {
    Plan plan;
    int64_t held = 0;
    int64_t cost = 0;
  };
  std::vector<Choice> all;
  for (uint32_t set = 0; set < (1U << free.size()); ++set) {
    Choice choice{full, 0, 0};
    for (size_t i = 0; i < free.size(); ++i) {
      if ((set >> i & 1U) == 0) continue;
      choice.plan.residency[free[i]] = kSave;
      choice.held += unit_bytes(setup, free[i], 1.2);
    }
    choice.cost = cost_of(setup, choice.plan, 1.2);
    all.push_back(std::move(choice));
  }
  const int64_t least = setup.peak(full, setup.even(1.2));
  const int64_t most = setup.save_all_bytes(1.2);
  int64_t partial = 0;
  for (int64_t budget = least; budget < most; budget += (most - least) / 17) {
    const Plan plan = first_plan("adapipe", setup, setup.with_budget(budget));
    const auto own = std::find_if(all.begin(), all.end(),
                                  [&plan](const Choice& choice) { return choice.plan == plan; });
    ASSERT_NE(own, all.end());
    for (const Choice& other : all) {
      EXPECT_TRUE(other.held > own->held || other.cost >= own->cost) << budget;
    }
    partial += own->held > 0 ? 1 : 0;
  }
  EXPECT_GT(partial, 8);  // the budgets really leave something to choose
}

TEST(AdaPipe, MicrobatchesInFlightShareTheBudget) {
  const SmallModel setup({});
  const int64_t budget = 2 * setup.save_all_bytes(1.2);
  const ProvisionContext context = setup.with_budget(budget);
  EXPECT_EQ(first_plan("adapipe", setup, context), uniform_plan(setup.graph, kSave));
  const Plan plan = first_plan("adapipe", setup, context, {.adapipe_in_flight = 4});
  EXPECT_LE(setup.peak(plan, setup.even(1.2)) + 3 * carried_bytes(setup, plan, 1.2), budget);
  EXPECT_GT(std::count(plan.residency.begin(), plan.residency.end(), kRecompute), 0);
  EXPECT_LT(cost_of(setup, plan, 1.2), cost_of(setup, uniform_plan(setup.graph, kRecompute), 1.2));
}

TEST(AdaPipe, KeepsItsPlanThroughASpikeAndThenDies) {
  const SmallModel setup({});
  const int64_t budget = setup.save_all_bytes(1.2);
  const ProvisionContext context = setup.with_budget(budget);
  const auto policy = make_policy("adapipe", context, {});
  const DrivenMicrobatch run = drive_microbatch(context, *policy, setup.even(2.6));
  for (const Decision& decision : run.decisions) {
    EXPECT_EQ(decision.plan, run.decisions[0].plan);
    EXPECT_FALSE(decision.mitigated);
  }
  EXPECT_EQ(run.decisions.back().short_by_bytes, run.memory.peak_bytes - budget);
  EXPECT_GT(run.memory.peak_bytes, budget);
}

bool is_cheap(const std::string& unit) {
  return unit.find("norm") != std::string::npos || unit.find("_act") != std::string::npos;
}

TEST(Kwai, RecomputesNormsAndActivationFunctionsOnEveryLayerAlike) {
  const SmallModel setup({.dense_first = true, .shared = true});
  const Plan plan = first_plan("kwai", setup, setup.context, {.kwai_offload_ratio = 0.0});
  int cheap = 0;
  for (size_t u = 0; u < setup.graph.units.size(); ++u) {
    const std::string& name = setup.graph.units[u].name;
    EXPECT_EQ(plan.residency[u], is_cheap(name) ? kRecompute : kSave) << name;
    cheap += is_cheap(name) ? 1 : 0;
  }
  // final_norm; two norms and one act in each of 3 layers; the shared experts' act in 2 of them.
  EXPECT_EQ(cheap, 1 + 3 * 3 + 2);
}

TEST(Kwai, OffloadsTheLargestTensorsUpToTheRatio) {
  const SmallModel setup({});
  const Plan none = first_plan("kwai", setup, setup.context, {.kwai_offload_ratio = 0.0});
  int64_t kept = 0;
  for (size_t u = 0; u < none.residency.size(); ++u) {
    const bool counted = none.residency[u] == kSave && !setup.graph.units[u].pinned;
    if (counted) kept += unit_bytes(setup, u, 1.2);
  }
  for (const double ratio : {0.1, 0.5, 0.9}) {
    const Plan plan = first_plan("kwai", setup, setup.context, {.kwai_offload_ratio = ratio});
    int64_t offloaded = 0, smallest = std::numeric_limits<int64_t>::max(), largest_kept = 0;
    for (size_t u = 0; u < plan.residency.size(); ++u) {
      const int64_t bytes = unit_bytes(setup, u, 1.2);
      if (plan.residency[u] == kOffload) {
        offloaded += bytes;
        smallest = std::min(smallest, bytes);
      } else if (plan.residency[u] == kSave && !setup.graph.units[u].pinned) {
        largest_kept = std::max(largest_kept, bytes);
      }
    }
    EXPECT_GE(static_cast<double>(offloaded), ratio * static_cast<double>(kept)) << ratio;
    EXPECT_LT(static_cast<double>(offloaded - smallest), ratio * static_cast<double>(kept));
    EXPECT_GE(smallest, largest_kept) << ratio;
  }
}

TEST(Kwai, LeavesSmallTensorsOnTheDevice) {
  const SmallModel setup({});
  const Plan plan = first_plan("kwai", setup, setup.context, {.kwai_offload_ratio = 1.0});
  int64_t kept = 0;
  for (size_t u = 0; u < plan.residency.size(); ++u) {
    if (plan.residency[u] != kRecompute && !setup.graph.units[u].pinned) {
      kept += unit_bytes(setup, u, 1.2);
    }
  }
  for (size_t u = 0; u < plan.residency.size(); ++u) {
    if (plan.residency[u] == kRecompute || setup.graph.units[u].pinned) continue;
    EXPECT_EQ(plan.residency[u] == kOffload, unit_bytes(setup, u, 1.2) >= kept / 64)
        << setup.graph.units[u].name;
  }
}

TEST(Kwai, FitsTheSmallestRatioToItsLoad) {
  const SmallModel setup({.layers = 4});
  const Plan none = first_plan("kwai", setup, setup.context);  // no budget: nothing to offload
  EXPECT_EQ(std::count(none.residency.begin(), none.residency.end(), kOffload), 0);
  const Plan all = first_plan("kwai", setup, setup.context, {.kwai_offload_ratio = 1.0});
  const int64_t most = setup.peak(none, setup.even(1.2));
  const int64_t least = setup.peak(all, setup.even(1.2));
  ASSERT_LT(least, most);
  for (int64_t budget = least; budget < most; budget += (most - least) / 11) {
    const Plan plan = first_plan("kwai", setup, setup.with_budget(budget));
    EXPECT_LE(setup.peak(plan, setup.even(1.2)), budget);
    // One tensor less, the smallest of those that went last, and it does not fit.
    Plan fewer = plan;
    size_t last = 0;
    int64_t smallest = std::numeric_limits<int64_t>::max();
    for (size_t u = 0; u < plan.residency.size(); ++u) {
      if (plan.residency[u] != kOffload || unit_bytes(setup, u, 1.2) > smallest) continue;
      smallest = unit_bytes(setup, u, 1.2);
      last = u;
    }
    fewer.residency[last] = kSave;
    EXPECT_GT(setup.peak(fewer, setup.even(1.2)), budget);
  }
}

TEST(Retry, SavesEverythingUpToItsFactor) {
  const SmallModel setup({});
  const auto policy = make_policy("retry", setup.context, {});
  const DrivenMicrobatch run = drive_microbatch(setup.context, *policy, setup.even(1.10));
  for (const Decision& decision : run.decisions) {
    EXPECT_EQ(decision.plan, uniform_plan(setup.graph, kSave));
    EXPECT_FALSE(decision.repeat_step || decision.mitigated);
    EXPECT_EQ(decision.exposed_ns, 0);
  }
}

TEST(Retry, AsksForTheStepAgainFromTheGateThatOverflows) {
  const SmallModel setup({});
  std::vector<LayerLoad> loads = setup.even();
  loads[1].rows = scaled_load(setup.context.balanced, setup.context.worst_case, 1.10).rows + 1;
  const auto policy = make_policy("retry", setup.context, {});
  const DrivenMicrobatch run = drive_microbatch(setup.context, *policy, loads);
  std::vector<bool> repeats;
  for (const Decision& decision : run.decisions) repeats.push_back(decision.repeat_step);
  EXPECT_THAT(repeats, testing::ElementsAre(false, false, true, true));
  // The micro-batch goes on as the survival plan would: nothing that can be given up stays.
  EXPECT_EQ(run.decisions.back().plan, survival_plan(setup.graph));
  // Repeating costs more than a step under full recompute adds to one under save-all.
  EXPECT_GT(run.decisions.back().exposed_ns,
            cost_of(setup, uniform_plan(setup.graph, kRecompute), 1.0));
  const DrivenMicrobatch next = drive_microbatch(setup.context, *policy, setup.even());
  for (const Decision& decision : next.decisions) EXPECT_FALSE(decision.repeat_step);
  const auto roomier = make_policy("retry", setup.context, {.retry_factor = 1.25});
  EXPECT_FALSE(drive_microbatch(setup.context, *roomier, loads).decisions.back().repeat_step);
}

TEST(Retry, LivesThroughAnyRoutingIfItsBuffersFit) {
  for (const CaseOptions& options : {CaseOptions{}, CaseOptions{.layers = 4, .shared = true}}) {
    const SmallModel setup(options);
    const ProvisionContext context =
        setup.with_budget(std::max(setup.floor_bytes(), setup.save_all_bytes(1.10)));
    const auto policy = make_policy("retry", context, {});
    std::mt19937 random(8);
    int repeats = 0;
    for (int i = 0; i < 300; ++i) {
      const DrivenMicrobatch run =
          drive_microbatch(context, *policy, random_routing(setup, random));
      ASSERT_LE(run.memory.peak_bytes, context.activation_budget_bytes) << i;
      repeats += run.decisions.back().repeat_step ? 1 : 0;
    }
    EXPECT_GT(repeats, 50);
  }
}

// The trace of a thousand iterations: 971 calm ones, spikes at 17 + 34 n.
TEST(Retry, RepeatsCalmIterationsToo) {
  const SmallModel setup({.layers = 1});
  const auto repeats_at = [&setup](double retry_factor) {
    const auto policy = make_policy("retry", setup.context, {.retry_factor = retry_factor});
    int calm = 0, spikes = 0;
    for (int i = 0; i < 1000; ++i) {
      const bool spike = i % 34 == 17 && i < 17 + 34 * 29;
      const double factor = spike ? 2.6 : 1.0 + 0.2 * ((37 * i) % 101) / 100;
      const DrivenMicrobatch run = drive_microbatch(setup.context, *policy, setup.even(factor));
      (spike ? spikes : calm) += run.decisions.back().repeat_step ? 1 : 0;
    }
    return std::pair(calm, spikes);
  };
  EXPECT_EQ(repeats_at(1.10), std::pair(479, 29));
  EXPECT_EQ(repeats_at(1.25), std::pair(0, 29));
}

TEST(Retry, SurvivesNothingAboveBuffersThatDoNotFit) {
  const SmallModel setup({});
  const double worst = static_cast<double>(setup.context.worst_case.rows) /
                       static_cast<double>(setup.context.balanced.rows);
  const int64_t buffers = std::max(setup.save_all_bytes(1.10), setup.floor_bytes());
  EXPECT_EQ(largest_surviving_factor("retry", setup.with_budget(buffers), {}), worst);
  const int64_t budget = setup.save_all_bytes(1.05);
  ASSERT_GE(budget, setup.floor_bytes());
  EXPECT_NEAR(largest_surviving_factor("retry", setup.with_budget(budget), {}), 1.05, 0.01);
}

/// Two layers of a pipeline stage as Megatron trains it; units are called as storages.
struct MegatronStage {
  MegatronStage() {
    spec = SmallModel({.layers = 2}).spec;
    options.seq = 64;
    options.ep_size = 4;
    options.has_embedding = options.has_head = false;
    graph = build_megatron_graph(spec, options);
    cost = megatron_costs(graph, spec, options, SmallModel({}).system);
    context.graph = &graph;
    context.cost = &cost;
    context.balanced = {128, 128};
    context.worst_case = {512, 512};
  }
  ResidencyId at(const Plan& plan, const char* unit) const {
    return plan.residency[static_cast<size_t>(graph.find_unit(unit))];
  }
  Plan plan(const char* policy, const PolicyOptions& of, double factor = 1.0) const {
    const auto made = make_policy(policy, context, of);
    const LayerLoad load = scaled_load(context.balanced, context.worst_case, factor);
    return drive_microbatch(context, *made, every_layer(graph, load)).decisions.back().plan;
  }

  ModelSpec spec;
  MegatronGraphOptions options;
  Graph graph;
  CostTable cost;
  ProvisionContext context;
};

TEST(RivalPolicies, KnowUnitsOfMegatronGraphsByTheirOperators) {
  const MegatronStage stage;
  const Plan kwai = stage.plan("kwai", {.kwai_offload_ratio = 0.0});
  const Plan selective = stage.plan("selective", {.recompute_modules = {"moe_act", "layernorm"}});
  for (const Plan& plan : {kwai, selective}) {
    for (const char* unit : {"layer0.moe_act.out", "layer1.normed_attn", "layer1.normed_mlp"}) {
      EXPECT_EQ(stage.at(plan, unit), kRecompute) << unit;
    }
    for (const char* unit : {"layer0.expert_fc1.out", "layer1.rows", "layer0.attn_out"}) {
      EXPECT_EQ(stage.at(plan, unit), kSave) << unit;
    }
  }
  const Plan calm = stage.plan("threshold", {.threshold = 2.0}, 2.0);
  const Plan hot = stage.plan("threshold", {.threshold = 2.0}, 2.1);
  for (const char* unit : {"layer0.expert_fc1.out", "layer1.moe_act.out"}) {
    EXPECT_EQ(stage.at(calm, unit), kSave) << unit;
    EXPECT_EQ(stage.at(hot, unit), kRecompute) << unit;
  }
  EXPECT_EQ(stage.at(hot, "layer0.normed_mlp"), kSave);
}

TEST(RivalPolicies, AStageNeedNotHaveEveryModule) {
  const MegatronStage stage;
  // The dense layers of the model may lie in another stage, its mistyped modules do not.
  const PolicyOptions modules = {.recompute_modules = {"mlp", "moe_act"}};
  EXPECT_EQ(stage.at(stage.plan("selective", modules), "layer0.moe_act.out"), kRecompute);
  EXPECT_THAT(message_of([&] { stage.plan("selective", {.recompute_modules = {"mpl"}}); }),
              HasSubstr("mpl"));
}

TEST(RivalPolicies, RefuseOptionsOutOfRange) {
  const SmallModel setup({});
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto refused = [&setup](const char* policy, const PolicyOptions& options) {
    return message_of([&] { make_policy(policy, setup.context, options); });
  };
  for (const double bad : {0.0, -1.0, nan, std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(refused("adapipe", {.adapipe_fit_imbalance = bad}),
                HasSubstr("adapipe_fit_imbalance"));
    EXPECT_THAT(refused("kwai", {.kwai_fit_imbalance = bad}), HasSubstr("kwai_fit_imbalance"));
    EXPECT_THAT(refused("retry", {.retry_factor = bad}), HasSubstr("retry_factor"));
  }
  EXPECT_THAT(refused("adapipe", {.adapipe_in_flight = 0}), HasSubstr("adapipe_in_flight"));
  for (const double bad : {-0.1, 1.1, nan}) {
    EXPECT_THAT(refused("kwai", {.kwai_offload_ratio = bad}), HasSubstr("kwai_offload_ratio"));
  }
}

}  // namespace
}  // namespace bagualu
