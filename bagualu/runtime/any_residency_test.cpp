// Any residencies, same numbers: whatever is given up, and whenever, losses and gradients keep
// their bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "bagualu/runtime/runner_rig.h"

namespace bagualu {
namespace {

// Counts of recorded routing per expert, from tame to hostile; each at most `tokens`.
std::vector<int64_t> random_counts(const ModelSpec& spec, int64_t tokens, Random& random) {
  const int64_t total = tokens * spec.top_k;
  std::vector<int64_t> counts(spec.experts, 0);
  const int64_t kind = below(random, 4);
  if (kind == 0) {  // all tokens to the same top_k experts, the others empty
    const int64_t first = below(random, spec.experts - spec.top_k + 1);
    std::fill_n(counts.begin() + first, spec.top_k, tokens);
    return counts;
  }
  if (kind == 1) {  // exactly even
    for (int64_t i = 0; i < total; ++i) ++counts[i % spec.experts];
    return counts;
  }
  // Anything; kind 2 uses only a few experts.
  const int64_t used = kind == 2 ? spec.top_k + 1 : spec.experts;
  for (int64_t i = 0; i < total; ++i) {
    int64_t e = below(random, used);
    while (counts[e] == tokens) e = (e + 1) % used;
    ++counts[e];
  }
  std::shuffle(counts.begin(), counts.end(), random);
  return counts;
}

// Natural routing (empty), or recorded counts for every MoE layer.
RoutingOverride random_routing(const ModelSpec& spec, int64_t tokens, Random& random) {
  RoutingOverride routing;
  if (below(random, 4) == 0) return routing;
  routing.tokens_per_expert.resize(spec.layers);
  for (int64_t layer = 0; layer < spec.layers; ++layer) {
    if (spec.is_moe(layer)) routing.tokens_per_expert[layer] = random_counts(spec, tokens, random);
  }
  return routing;
}

struct Case {
  std::string name;
  ModelSpec spec;
  TrainerOptions options;
  int routings;
  int vectors;  // residency vectors per routing; half of them change at every gate
  bool ties = false;
};

std::vector<Case> cases() {
  ModelSpec one_expert_each = rich_moe_spec();
  one_expert_each.top_k = 1;
  one_expert_each.norm_topk_prob = false;
  ModelSpec losses = rich_moe_spec();
  losses.aux_loss_coef = 0.01;
  losses.z_loss_coef = 0.001;
  return {{"rich", losses, small_options(), 8, 14},
          {"top 1", one_expert_each, small_options(), 3, 12},
          {"plain", small_moe_spec(), small_options(), 4, 12},
          {"ties", rich_moe_spec(), small_options(), 1, 16, true},
          {"bf16", rich_moe_spec(), small_options(Dtype::kBf16), 2, 10}};
}

void expect_same_numbers(const Case& test, RunnerRig& rig, const RoutingOverride& routing,
                         Random& random, std::set<std::string>& seen) {
  PlanSource save_all(uniform_plan(rig.graph, kSave));
  const Numbers expected = rig.numbers(rig.run(save_all, &routing));
  for (int v = 0; v < test.vectors; ++v) {
    const Plan plan = random_plan(rig.graph, random);
    PlanSource fixed(plan);
    PlanSource changing([&] { return random_plan(rig.graph, random); });
    const MicrobatchReport report = rig.run(v % 2 == 0 ? fixed : changing, &routing);
    const auto found = differences(rig.numbers(report), expected);
    ASSERT_TRUE(found.empty()) << test.name << " vector " << v << ": " << found.front() << " and "
                               << found.size() - 1 << " more differ under "
                               << plan_to_json(rig.graph, report.plan);
    ASSERT_EQ(report.unaccounted_bytes, 0) << test.name << " vector " << v;
    ASSERT_GE(report.predicted_peak_bytes, report.measured_peak_bytes);
    for (ResidencyId r : report.plan.residency) seen.insert(std::string(residencies()[r].name));
  }
}

TEST(AnyResidency, LossesAndGradientsKeepTheirBits) {
  Random random(3);
  int vectors = 0;
  std::set<std::string> seen;
  for (const Case& test : cases()) {
    RunnerRig rig(test.spec, test.options);
    if (test.ties) {
      // Every logit 0: which experts win is decided by the order of experts alone.
      for (int64_t l = 0; l < rig.spec.layers; ++l) {
        if (rig.spec.is_moe(l)) rig.state.layer(l).router.weight.zero_();
      }
    }
    for (int i = 0; i < test.routings; ++i) {
      const RoutingOverride routing =
          test.ties ? RoutingOverride{} : random_routing(rig.spec, rig.graph.tokens, random);
      expect_same_numbers(test, rig, routing, random, seen);
      if (HasFatalFailure()) return;
      vectors += test.vectors;
    }
  }
  EXPECT_GE(vectors, 150);
  EXPECT_EQ(seen, (std::set<std::string>{"save", "recompute", "offload"}));
  RecordProperty("vectors", vectors);
}

TEST(AnyResidency, QuantiseChangesTheGradientsALittleAndTheLossNot) {
  for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
    RunnerRig rig(rich_moe_spec(), small_options(dtype));
    PlanSource save_all(uniform_plan(rig.graph, kSave));
    const Numbers expected = rig.numbers(rig.run(save_all));
    PlanSource quantised(uniform_plan(rig.graph, residency_from_name("quantise", "test")));
    const MicrobatchReport report = rig.run(quantised);
    const Numbers found = rig.numbers(report);
    EXPECT_GT(report.store.bytes_encoded, 0);
    EXPECT_EQ(found.losses.cross_entropy_sum, expected.losses.cross_entropy_sum);
    EXPECT_FALSE(differences(found, expected).empty());
    for (size_t i = 0; i < found.gradients.size(); ++i) {
      const at::Tensor want = expected.gradients[i].second;
      const double error = (found.gradients[i].second - want).norm().item<double>();
      EXPECT_LE(error, 0.1 * want.norm().item<double>()) << found.gradients[i].first;
    }
  }
}

}  // namespace
}  // namespace bagualu
