#include "bagualu/cli/plan_explain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>

#include "bagualu/cost/megatron_cost.h"
#include "bagualu/cost/roofline.h"
#include "bagualu/graph/native_moe.h"
#include "bagualu/model/model_spec.h"

namespace bagualu {
namespace {

std::string config(const std::string& file) { return BAGUALU_SOURCE_DIR "/configs/" + file; }

PlanExplanation explain_native_demo() {
  const ModelSpec spec = model_from_file(config("models/demo.json"));
  NativeGraphOptions options;
  options.ep_size = 4;
  const Graph graph = build_native_graph(spec, options);
  const SystemSpec system = system_from_file(config("systems/cpu-2core.json"));
  return explain_plan(graph, roofline_costs(graph, spec, options, system), {256, 64});
}

/// One MoE layer of DeepSeek-V3, whose latents are rebuilt by shared operators.
PlanExplanation explain_latent_attention() {
  const ModelSpec spec = model_from_file(config("models/deepseek-v3.json"));
  MegatronGraphOptions options;
  options.seq = 4096;
  options.ep_size = 64;
  options.first_layer = 10;
  options.layer_count = 1;
  options.has_embedding = options.has_head = false;
  const Graph graph = build_megatron_graph(spec, options);
  const SystemSpec system = system_from_file(config("systems/h800.json"));
  return explain_plan(graph, megatron_costs(graph, spec, options, system), {32768, 32768});
}

TEST(PlanExplain, CountsWhatTheUnitsOfANativeLayerMayBecome) {
  const PlanExplanation demo = explain_native_demo();
  ASSERT_EQ(demo.layers.size(), 5u);
  // attn_norm, qkv, core_attn, attn_proj, mlp_norm, expert_fc1, moe_act: three residencies each;
  // dispatch and combine, behind a collective: two. The router is pinned.
  EXPECT_EQ(demo.layers[1].units, 9);
  EXPECT_EQ(demo.layers[1].pinned, 1);
  EXPECT_NEAR(demo.layers[1].naive_log10, std::log10(2187.0 * 4), 1e-9);
  EXPECT_EQ(demo.layers[1].combinations, 7 * 2 + 2);
  EXPECT_EQ(demo.layers[1].redundant, 0);
}

TEST(PlanExplain, TheTotalIsTheSumOfTheLayersAndOfTheComponents) {
  for (const PlanExplanation& plan : {explain_native_demo(), explain_latent_attention()}) {
    double naive = 0;
    int64_t units = 0, combinations = 0, redundant = 0;
    for (const ExplainedLayer& layer : plan.layers) {
      naive += layer.naive_log10;
      units += layer.units;
      combinations += layer.combinations;
      redundant += layer.redundant;
    }
    EXPECT_DOUBLE_EQ(plan.total.naive_log10, naive);
    EXPECT_EQ(plan.total.units, units);
    EXPECT_EQ(plan.total.combinations, combinations);
    EXPECT_EQ(plan.total.redundant, redundant);
    for (const ExplainedComponent& component : plan.components) {
      units -= static_cast<int64_t>(component.units.size());
      combinations -= component.combinations;
      redundant -= static_cast<int64_t>(component.removed.size());
    }
    EXPECT_EQ(units, 0);
    EXPECT_EQ(combinations, 0);
    EXPECT_EQ(redundant, 0);
  }
}

TEST(PlanExplain, NamesCoupledUnitsTheirOperatorsAndWhatStandsInForTheRemoved) {
  const PlanExplanation plan = explain_latent_attention();
  ASSERT_GT(plan.total.redundant, 0);
  for (const ExplainedComponent& component : plan.components) {
    EXPECT_EQ(component.units.size() > 1, !component.coupled_by.empty()) << component.units[0];
    EXPECT_LT(component.removed.size(), static_cast<size_t>(component.combinations));
    for (const RemovedCombination& gone : component.removed) {
      EXPECT_GE(gone.bytes_less, 0);
      EXPECT_GE(gone.ns_less, 0);
      ASSERT_FALSE(gone.instead.parts.empty());
      for (const auto& part : gone.choice.parts) {
        const auto stands_in =
            std::find_if(gone.instead.parts.begin(), gone.instead.parts.end(),
                         [&](const auto& other) { return other.residency == part.residency; });
        ASSERT_NE(stands_in, gone.instead.parts.end());
        EXPECT_THAT(stands_in->units, testing::IsSupersetOf(part.units));
      }
    }
  }
}

TEST(PlanExplain, PrintsEqualLayersOnOneLineAndWritesTheSameNumbersAsJson) {
  const PlanExplanation demo = explain_native_demo();
  std::ostringstream out;
  print_explanation(demo, out);
  EXPECT_THAT(out.str(), testing::HasSubstr("layers 0-3, each"));
  EXPECT_THAT(out.str(), testing::HasSubstr("70 combinations stand for 10^17.2"));
  EXPECT_THAT(out.str(), testing::HasSubstr("none: every unit"));
  const Json json = to_json(demo);
  EXPECT_EQ(json.at("total").at("combinations"), 70);
  EXPECT_EQ(json.at("layers").size(), 5u);
  EXPECT_EQ(json.at("components").size(), 39u);

  std::ostringstream latent;
  print_explanation(explain_latent_attention(), latent);
  for (const char* words : {"shared: ", "without: recompute ", "for: recompute "}) {
    EXPECT_THAT(latent.str(), testing::HasSubstr(words));
  }
}

}  // namespace
}  // namespace bagualu
