#include "bagualu/cost/op_cost.h"

#include <gtest/gtest.h>

#include "bagualu/base/error.h"
#include "bagualu/cost/op_flops.h"
#include "bagualu/cost/residency_pricing.h"
#include "bagualu/cost/roofline.h"
#include "bagualu/graph/test_models.h"

namespace bagualu {
namespace {

const NativeGraphOptions kOptions = {.micro_batch_size = 2, .seq = 16, .ep_size = 4};

SystemSpec round_system() {
  SystemSpec system;
  system.fp32_flops_per_s = 2e9;
  system.bf16_flops_per_s = 8e9;
  system.compute_efficiency_fraction = 0.5;
  system.memory_bytes_per_s = 1e9;
  system.link_bytes_per_s = 1e8;
  system.d2h_bytes_per_s = 1e9;
  system.h2d_bytes_per_s = 1e9;
  system.encode_bytes_per_s = 1e9;
  system.launch_ns = 100;
  return system;
}

TEST(OpTime, InterpolatesAndExtendsTheLastSlope) {
  const OpTime time{.points = {{10, 100}, {20, 200}, {40, 600}}, .measured = true};
  EXPECT_EQ(time.eval(10), 100);
  EXPECT_EQ(time.eval(15), 150);
  EXPECT_EQ(time.eval(20), 200);
  EXPECT_EQ(time.eval(30), 400);
  EXPECT_EQ(time.eval(50), 800);  // 20 ns per unit of x beyond 40
  EXPECT_EQ(time.eval(5), 50);    // 10 ns per unit below 10
  EXPECT_EQ(OpTime({.points = {{0, 500}, {10, 1500}}}).eval(0), 500);
  EXPECT_EQ(OpTime({.points = {{10, 5}, {20, 105}}}).eval(0), 0);  // never negative
  EXPECT_EQ(OpTime({.points = {{10, 7}}}).eval(1000), 7);
  EXPECT_THROW(OpTime{}.eval(1), InternalError);
}

TEST(Roofline, TakesTheSlowestOfThreeAndAddsTheLaunch) {
  const SystemSpec system = round_system();
  // 1e9 flops/s reached: 1000 flops take 1000 ns; 500 bytes 500 ns; 50 link bytes 500 ns.
  EXPECT_EQ(roofline_ns({1000, 500, 50}, Dtype::kFp32, system), 1100);
  EXPECT_EQ(roofline_ns({1000, 500, 50}, Dtype::kBf16, system), 600);
  EXPECT_EQ(roofline_ns({0, 0, 200}, Dtype::kFp32, system), 2100);
}

TEST(OpWork, QkvCountsItsProduct) {
  const ModelSpec spec = small_moe_spec();  // h 32, (4 + 2 * 2) * 16 = 128 columns
  const OpWork work = forward_work(OpKind::kQkv, spec, kOptions, 10);
  EXPECT_EQ(work.flops, 2 * 10 * 32 * 128);
  EXPECT_EQ(work.memory_bytes, 10 * (32 + 128) * 4 + 32 * 128 * 4);
  EXPECT_EQ(backward_work(OpKind::kQkv, spec, kOptions, 10).flops, 2 * work.flops);
}

TEST(OpWork, ExpertsCountThreeProductsPerRow) {
  const ModelSpec spec = small_moe_spec();  // h 32, f 48: 2 * 3 * h * f, and 6 f for the activation
  EXPECT_EQ(forward_work(OpKind::kExperts, spec, kOptions, 10).flops, 10 * (6 * 32 * 48 + 6 * 48));
  EXPECT_EQ(forward_work(OpKind::kExperts, spec, kOptions, 0).memory_bytes, 0);
}

TEST(OpWork, ExchangeSendsTheShareOfOtherRanks) {
  // A row is 32 * 4 + 4 = 132 bytes; 3 of 4 ranks are others.
  EXPECT_EQ(forward_work(OpKind::kDispatch, small_moe_spec(), kOptions, 8).link_bytes,
            8 * 132 * 3 / 4);
  EXPECT_EQ(forward_work(OpKind::kCombine, small_moe_spec(), kOptions, 8).link_bytes,
            8 * 128 * 3 / 4);
}

class RooflineTable : public ::testing::TestWithParam<bool> {};

TEST_P(RooflineTable, CoversEveryOpAndEveryAllowedResidency) {
  const ModelSpec spec = GetParam() ? rich_moe_spec() : small_moe_spec();
  const Graph graph = build_native_graph(spec, kOptions);
  const CostTable costs = roofline_costs(graph, spec, kOptions, round_system());
  const LayerLoad calm{.rows = 64, .piece_rows = 16}, spike{.rows = 256, .piece_rows = 16};
  for (size_t op = 0; op < graph.ops.size(); ++op) {
    const int i = static_cast<int>(op);
    EXPECT_GE(costs.forward_ns(graph, i, calm), 100) << graph.ops[op].name;
    EXPECT_EQ(costs.backward_ns(graph, i, calm) > 0, graph.ops[op].has_backward);
    const bool grows = costs.forward_ns(graph, i, spike) > costs.forward_ns(graph, i, calm);
    EXPECT_EQ(grows, scales_with_rows(graph.ops[op].kind)) << graph.ops[op].name;
  }
  for (size_t u = 0; u < graph.units.size(); ++u) {
    const int i = static_cast<int>(u);
    EXPECT_EQ(costs.residency_ns(graph, i, kSave, calm), 0);
    EXPECT_GT(costs.residency_ns(graph, i, kOffload, calm), 0) << graph.units[u].name;
    if (graph.units[u].rebuild == Rebuild::kNever) {
      EXPECT_THROW(costs.residency_ns(graph, i, kRecompute, calm), InternalError);
    } else {
      EXPECT_GT(costs.residency_ns(graph, i, kRecompute, calm), 0) << graph.units[u].name;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Models, RooflineTable, ::testing::Bool());

TEST(CostTable, RecomputeIsTheProducersForward) {
  const ModelSpec spec = small_moe_spec();
  const Graph graph = build_native_graph(spec, kOptions);
  const CostTable costs = roofline_costs(graph, spec, kOptions, round_system());
  EXPECT_EQ(costs.residency_ns(graph, graph.find_unit("layer1.qkv"), kRecompute, {}),
            costs.forward_ns(graph, graph.find_op("layer1.qkv"), {}));
}

TEST(CostTable, AUnitWithoutBytesCostsNothing) {
  const ModelSpec spec = small_moe_spec();
  const Graph graph = build_native_graph(spec, kOptions);
  const CostTable costs = roofline_costs(graph, spec, kOptions, round_system());
  const int unit = graph.find_unit("layer1.expert_fc1");
  for (ResidencyId r = 0; r < residencies().size(); ++r) {
    EXPECT_EQ(costs.residency_ns(graph, unit, r, LayerLoad{}), 0) << residencies()[r].name;
  }
}

}  // namespace
}  // namespace bagualu
