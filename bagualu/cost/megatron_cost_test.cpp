#include "bagualu/cost/megatron_cost.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

#include "bagualu/graph/test_models.h"

namespace bagualu {
namespace {

std::string config(const std::string& name) {
  return fmt::format("{}/configs/{}.json", BAGUALU_SOURCE_DIR, name);
}

struct Stage {
  ModelSpec spec = model_from_file(config("models/deepseek-v3"));
  MegatronGraphOptions options;
  Graph graph;
  LayerLoad load = {.rows = 32768};

  explicit Stage(MegatronGraphOptions chosen)
      : options(chosen), graph(build_megatron_graph(spec, options)) {}
  OpWork forward(const std::string& op) const {
    return megatron_forward_work(graph, graph.find_op(op), spec, options, load);
  }
  OpWork backward(const std::string& op) const {
    return megatron_backward_work(graph, graph.find_op(op), spec, options, load);
  }
};

constexpr int64_t kTokens = 4096;
constexpr int64_t kMiB = int64_t{1} << 20;

// Megatron-MoE-ModelZoo: 341.951 TFLOP forward for 4096 tokens, and three times that with backward.
// Fused attention's backward is 2.6 times its forward, not twice: 0.6 * 41.9 TFLOP = 2.5 % more.
TEST(MegatronWork, OfDeepSeekV3IsThatOfTheModelZoo) {
  const Stage stage({.seq = 4096, .ep_size = 64});
  double forward = 0, backward = 0;
  for (int op = 0; op < static_cast<int>(stage.graph.ops.size()); ++op) {
    const auto flops = [&](const OpWork& work) { return static_cast<double>(work.flops) / 1e12; };
    forward += flops(megatron_forward_work(stage.graph, op, stage.spec, stage.options, stage.load));
    backward +=
        flops(megatron_backward_work(stage.graph, op, stage.spec, stage.options, stage.load));
  }
  EXPECT_NEAR(forward, 341.951, 0.0001 * 341.951);
  EXPECT_NEAR(forward + backward, 1025.853 + 0.6 * 41.9, 0.0005 * 1025.853);
}

TEST(MegatronWork, OfOneLayerIsWhatTheShapesSay) {
  const Stage stage({.seq = 4096,
                     .ep_size = 64,
                     .first_layer = 10,
                     .layer_count = 1,
                     .has_embedding = false,
                     .has_head = false});
  EXPECT_EQ(stage.forward("layer10.q_up").flops, 2 * kTokens * 1536 * 24576);
  EXPECT_EQ(stage.backward("layer10.q_up").flops, 4 * kTokens * 1536 * 24576);
  // Half the square: 4096 * 4096 * 128 heads * (192 + 128).
  EXPECT_EQ(stage.forward("layer10.core_attn").flops, kTokens * kTokens * 128 * (192 + 128));
  EXPECT_EQ(stage.backward("layer10.core_attn").flops,
            kTokens * kTokens * 128 * (3 * 192 + 2 * 128));
  EXPECT_EQ(stage.forward("layer10.expert_fc1").flops, 2 * int64_t{32768} * 7168 * 4096);
  // Rows in, products out, four local experts' weights.
  EXPECT_EQ(stage.forward("layer10.expert_fc1").memory_bytes,
            (448 + 256) * kMiB + int64_t{4} * 7168 * 4096 * 2);
  EXPECT_EQ(stage.forward("layer10.dispatch").link_bytes, 448 * kMiB / 64 * 63);
  EXPECT_EQ(stage.forward("layer10.combine").link_bytes, 448 * kMiB / 64 * 63);
  EXPECT_EQ(stage.forward("stage_recv").link_bytes, 56 * kMiB);
  EXPECT_EQ(stage.forward("layer10.mlp_bda").flops, 0);
}

TEST(MegatronCosts, FollowTheRowsOnlyWhereTheOperatorDoes) {
  const Stage stage({.seq = 4096, .ep_size = 64, .first_layer = 10, .layer_count = 1});
  const CostTable costs = megatron_costs(stage.graph, stage.spec, stage.options,
                                         system_from_file(config("systems/h200")));
  ASSERT_EQ(costs.forward.size(), stage.graph.ops.size());
  ASSERT_EQ(costs.rebuild.size(), stage.graph.units.size());
  const auto ns = [&](const std::string& op, int64_t rows) {
    return costs.forward_ns(stage.graph, stage.graph.find_op(op), {.rows = rows});
  };
  EXPECT_EQ(ns("layer10.q_up", 0), ns("layer10.q_up", 65536));
  EXPECT_GT(ns("layer10.expert_fc1", 65536), ns("layer10.expert_fc1", 32768));
  EXPECT_GT(ns("layer10.q_up", 0), 0);
  // 1.92 TFLOP at half of 989 TFLOP/s, and 5 us of launch.
  EXPECT_NEAR(static_cast<double>(ns("layer10.expert_fc1", 32768)), 3.9e6, 0.1e6);
}

TEST(Systems, EveryPresetIsReadable) {
  for (const char* name : {"cpu-2core", "h800", "h100", "h200"}) {
    EXPECT_EQ(system_from_file(config(std::string("systems/") + name)).name, name);
  }
}

}  // namespace
}  // namespace bagualu
