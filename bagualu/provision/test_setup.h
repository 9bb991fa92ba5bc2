// Small models and their contexts for the tests of this room.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "bagualu/cost/roofline.h"
#include "bagualu/graph/native_moe.h"
#include "bagualu/graph/pieces.h"
#include "bagualu/provision/floor.h"
#include "bagualu/provision/policy.h"

namespace bagualu {

struct CaseOptions {
  int64_t layers = 3;
  int64_t ep_size = 4;
  int64_t tokens = 64;
  bool dense_first = false;
  bool shared = false;
  double copy_hidden_fraction = 0.5;
};

/// Not copyable: the context points into it.
struct SmallModel {
  static constexpr int64_t kTopK = 2, kExperts = 8, kChunkRows = 48;

  explicit SmallModel(const CaseOptions& options) {
    spec.name = "test";
    spec.layers = options.layers;
    spec.hidden = 64;
    spec.heads = 4;
    spec.kv_heads = 2;
    spec.head_dim = 16;
    spec.vocab = 256;
    spec.experts = kExperts;
    spec.top_k = kTopK;
    spec.expert_ffn = 96;
    spec.shared_ffn = options.shared ? 64 : 0;
    spec.dense_ffn = options.dense_first ? 128 : 0;
    spec.moe_layer.assign(static_cast<size_t>(options.layers), 1);
    if (options.dense_first) spec.moe_layer[0] = 0;
    graph_options.micro_batch_size = 1;
    graph_options.seq = options.tokens;
    graph_options.ep_size = options.ep_size;
    graph = build_native_graph(spec, graph_options);
    system.fp32_flops_per_s = system.bf16_flops_per_s = 20e9;
    system.memory_bytes_per_s = 10e9;
    system.link_bytes_per_s = 1e9;
    system.d2h_bytes_per_s = system.h2d_bytes_per_s = 4e9;
    system.encode_bytes_per_s = 2e9;
    system.copy_hidden_fraction = options.copy_hidden_fraction;
    system.launch_ns = 2000;
    cost = roofline_costs(graph, spec, graph_options, system);
    const int64_t local = kExperts / options.ep_size;
    context.graph = &graph;
    context.cost = &cost;
    context.balanced.rows = options.tokens * kTopK;
    context.balanced.piece_rows = std::min(kChunkRows, context.balanced.rows / local);
    context.worst_case = worst_case_load(options.ep_size, options.tokens, kTopK, local, kChunkRows);
  }
  SmallModel(const SmallModel&) = delete;
  SmallModel& operator=(const SmallModel&) = delete;

  std::vector<LayerLoad> even(double factor = 1.0) const {
    return std::vector<LayerLoad>(static_cast<size_t>(graph.layers),
                                  scaled_load(context.balanced, context.worst_case, factor));
  }

  int64_t floor_bytes() const { return compute_floor(graph, context.worst_case).activation_bytes; }

  int64_t save_all_bytes(double factor = 1.0) const {
    return peak(uniform_plan(graph, kSave), even(factor));
  }

  int64_t peak(const Plan& plan, const std::vector<LayerLoad>& loads) const {
    MemoryReplay replay;
    replay_memory(graph, plan, memory_table(graph, loads), build_timeline(graph, plan), 0, replay);
    return replay.peak_bytes;
  }

  ProvisionContext with_budget(int64_t activation_budget_bytes) const {
    ProvisionContext limited = context;
    limited.activation_budget_bytes = activation_budget_bytes;
    return limited;
  }

  ModelSpec spec;
  NativeGraphOptions graph_options;
  Graph graph;
  SystemSpec system;
  CostTable cost;
  ProvisionContext context;
};

/// Routing from tame to hostile, by kind: near even, anything, all tokens here, nothing here,
/// alternating, a spike after half of the layers.
inline std::vector<LayerLoad> random_routing(const SmallModel& setup, std::mt19937& random) {
  const LayerLoad worst = setup.context.worst_case;
  const int64_t balanced = setup.context.balanced.rows;
  // Without expert parallelism a balanced load is the worst case already: ranges are cut off there.
  const auto between = [&random, &worst](int64_t low, int64_t high) {
    high = std::min(high, worst.rows);
    return std::uniform_int_distribution<int64_t>(std::min(low, high), high)(random);
  };
  const int64_t kind = between(0, 5);
  std::vector<LayerLoad> loads;
  for (int layer = 0; layer < setup.graph.layers; ++layer) {
    int64_t rows = between(balanced * 8 / 10, balanced * 12 / 10);
    if (kind == 1) rows = between(0, worst.rows);
    if (kind == 2) rows = worst.rows;
    if (kind == 3) rows = 0;
    if (kind == 4) rows = layer % 2 == 0 ? worst.rows : 0;
    if (kind == 5 && 2 * layer >= setup.graph.layers) rows = between(balanced * 2, worst.rows);
    loads.push_back({rows, std::min(rows, between(1, worst.piece_rows))});
    if (kind == 2) loads.back() = worst;
  }
  return loads;
}

}  // namespace bagualu
