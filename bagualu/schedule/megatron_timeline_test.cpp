// Timelines of the megatron profile: closures through unsaved intermediates, operators whose
// outputs have fates of their own.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

#include "bagualu/graph/megatron_moe.h"
#include "bagualu/graph/test_models.h"
#include "bagualu/schedule/reference_walk.h"
#include "bagualu/schedule/replay.h"

namespace bagualu {
namespace {

ModelSpec latent_spec() {
  ModelSpec spec = rich_moe_spec();
  spec.qk_norm = false;
  spec.kv_heads = spec.heads;
  spec.head_dim = 48;
  spec.q_lora_rank = 32;
  spec.kv_lora_rank = 16;
  spec.qk_nope_head_dim = 32;
  spec.qk_rope_head_dim = 16;
  spec.v_head_dim = 32;
  return spec;
}

std::vector<Graph> graphs() {
  std::vector<Graph> all;
  for (const ModelSpec& spec : {latent_spec(), rich_moe_spec(), small_moe_spec()}) {
    for (const bool twins : {false, true}) {
      for (const int64_t ep : {1, 4}) {
        all.push_back(build_megatron_graph(
            spec, {.seq = 24, .ep_size = ep, .gate_at_combine = twins, .fp8_twins = twins}));
        all.push_back(build_megatron_graph(spec, {.seq = 24,
                                                  .ep_size = ep,
                                                  .first_layer = 1,
                                                  .has_embedding = false,
                                                  .has_head = false,
                                                  .fp8_twins = twins}));
      }
    }
  }
  return all;
}

Plan random_plan(const Graph& graph, std::mt19937& random) {
  Plan plan = uniform_plan(graph, kSave);
  for (size_t u = 0; u < graph.units.size(); ++u) {
    const UnitSpec& unit = graph.units[u];
    if (unit.pinned) continue;
    const ResidencyId choice = static_cast<ResidencyId>(random() % 3);
    plan.residency[u] = choice == kRecompute && unit.rebuild == Rebuild::kNever ? kOffload : choice;
  }
  plan.eager_drain = random() % 2 == 0;
  plan.prefetch = random() % 2 == 0;
  return plan;
}

void expect_the_reference_agrees(const Graph& graph, const Plan& plan,
                                 const std::vector<LayerLoad>& loads) {
  const Timeline timeline = build_timeline(graph, plan);
  ReferenceWalk reference(graph, loads);
  std::map<int, int> runs;
  for (const Action& action : timeline) {
    reference.step(plan, action);
    if (action.kind == ActionKind::kRecompute) ++runs[action.id];
  }
  for (const auto& [op, times] : runs) EXPECT_EQ(times, 1) << graph.ops[op].name;
  EXPECT_EQ(reference.live(), 0);
  MemoryReplay replay;
  replay_memory(graph, plan, memory_table(graph, loads), timeline, 0, replay);
  EXPECT_EQ(replay.peak_bytes, reference.peak());
  EXPECT_EQ(replay.live_bytes, 0);
}

TEST(MegatronTimeline, AgreesWithTheReferenceUnderRandomPlans) {
  std::mt19937 random(11);
  const std::vector<Graph> all = graphs();
  for (int round = 0; round < 600 && !::testing::Test::HasFailure(); ++round) {
    SCOPED_TRACE(round);
    const Graph& graph = all[round % all.size()];
    std::vector<LayerLoad> loads(graph.layers);
    for (LayerLoad& load : loads) load.rows = static_cast<int64_t>(random() % 200);
    expect_the_reference_agrees(graph, random_plan(graph, random), loads);
  }
}

}  // namespace
}  // namespace bagualu
