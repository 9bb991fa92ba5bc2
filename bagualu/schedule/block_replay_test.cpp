#include "bagualu/schedule/block_replay.h"

#include <gtest/gtest.h>

#include <random>

#include "bagualu/graph/native_moe.h"
#include "bagualu/graph/test_models.h"

namespace bagualu {
namespace {

Plan random_plan(const Graph& graph, std::mt19937& random) {
  Plan plan = uniform_plan(graph, kSave);
  for (size_t u = 0; u < graph.units.size(); ++u) {
    const auto r = static_cast<ResidencyId>(random() % residencies().size());
    const UnitSpec& unit = graph.units[u];
    if (unit.pinned || (residencies()[r].needs_rebuild && unit.rebuild == Rebuild::kNever))
      continue;
    plan.residency[u] = r;
  }
  plan.eager_drain = random() % 2 == 0;
  plan.prefetch = random() % 2 == 0;
  return plan;
}

// From every gate, after loads have changed layer by layer, for plans of every kind.
TEST(BlockReplay, EqualsTheReplayOfEveryAction) {
  std::mt19937 random(3);
  const Graph graph = build_native_graph(rich_moe_spec(), {.seq = 32, .ep_size = 4});
  const LoadDependence dependence(graph);
  for (int round = 0; round < 60; ++round) {
    const Plan plan = random_plan(graph, random);
    const Timeline timeline = build_timeline(graph, plan);
    std::vector<LayerLoad> loads(static_cast<size_t>(graph.layers), {64, 16});
    MemoryTable table = memory_table(graph, loads);
    BlockReplay blocks(graph, dependence, plan, timeline);
    blocks.update_all(table);
    size_t begin = 0;
    MemoryReplay past;
    for (int gate = -1; gate < static_cast<int>(graph.gates.size()); ++gate) {
      if (gate >= 0) {
        const int layer = graph.gates[gate].layer;
        loads[layer] = {static_cast<int64_t>(random() % 300), static_cast<int64_t>(random() % 48)};
        const Timeline until(timeline.begin(), timeline.begin() + static_cast<int64_t>(begin));
        update_layer(graph, dependence, layer, loads[layer], table);
        const MemoryTable anew = memory_table(graph, loads);
        EXPECT_EQ(anew.storage_bytes, table.storage_bytes);
        EXPECT_EQ(anew.bwd_workspace, table.bwd_workspace);
        blocks.update_layer(table, layer);
        while (!(timeline[begin] == Action{ActionKind::kGate, layer})) ++begin;
        ++begin;
        past = {};
        replay_memory(graph, plan, table, {timeline.begin(), timeline.begin() + long(begin)}, 0,
                      past);
      }
      MemoryReplay rest = past;
      rest.peak_bytes = rest.live_bytes;
      rest.host_peak_bytes = rest.host_live_bytes;
      replay_memory(graph, plan, table, timeline, begin, rest);
      const BlockReplay::Peak peak =
          blocks.peak_from(blocks.first_block(gate), past.live_bytes, past.host_live_bytes, 0, 0);
      EXPECT_EQ(peak.bytes, rest.peak_bytes) << round << " gate " << gate;
      EXPECT_EQ(peak.host_bytes, rest.host_peak_bytes) << round << " gate " << gate;
    }
  }
}

}  // namespace
}  // namespace bagualu
