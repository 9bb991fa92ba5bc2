#include "decide_setup.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>

#include "bagualu/base/error.h"
#include "bagualu/cost/roofline.h"
#include "bagualu/graph/pieces.h"
#include "bagualu/provision/floor.h"
#include "bagualu/schedule/replay.h"

namespace bagualu {
namespace {

constexpr size_t kMicrobatches = 64;

/// Numbers of every line that is no comment; commas and spaces alike part them. The first field,
/// a name, is left out.
std::vector<std::vector<int64_t>> read_rows(const std::filesystem::path& file) {
  std::ifstream in(file);
  if (!in) throw InvalidInput(file.string(), "file", "nothing that can be read", "a CSV file");
  std::vector<std::vector<int64_t>> rows;
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::replace(line.begin(), line.end(), ',', ' ');
    std::istringstream words(line);
    std::string name;
    words >> name;
    rows.emplace_back();
    for (int64_t value = 0; words >> value;) rows.back().push_back(value);
  }
  return rows;
}

/// Layer after layer, kLayers to a micro-batch.
std::vector<std::vector<LayerLoad>> cut(const std::vector<LayerLoad>& layers) {
  constexpr auto kLayers = static_cast<size_t>(PolicySetup::kLayers);
  BGL_CHECK(layers.size() >= kMicrobatches * kLayers, layers.size());
  std::vector<std::vector<LayerLoad>> microbatches;
  for (size_t m = 0; m < kMicrobatches; ++m) {
    const auto first = layers.begin() + static_cast<int64_t>(m * kLayers);
    microbatches.emplace_back(first, first + kLayers);
  }
  return microbatches;
}

}  // namespace

PolicySetup::PolicySetup(const std::filesystem::path& configs)
    : spec(model_from_file(configs / "models/qwen3-30b-a3b.json")) {
  spec.layers = kLayers;
  spec.moe_layer.assign(static_cast<size_t>(kLayers), 1);
  NativeGraphOptions options;
  options.seq = kTokens;
  options.dtype = Dtype::kBf16;
  options.ep_size = kEpSize;
  graph = build_native_graph(spec, options);
  cost = roofline_costs(graph, spec, options, system_from_file(configs / "systems/h800.json"));
  context.graph = &graph;
  context.cost = &cost;
  context.balanced = scaled(1, 1);
  context.worst_case =
      worst_case_load(kEpSize, kTokens, spec.top_k, spec.experts / kEpSize, kChunkRows);
  const std::vector<LayerLoad> loads(static_cast<size_t>(kLayers),
                                     scaled_load(context.balanced, context.worst_case, 1.2));
  const Plan plan = uniform_plan(graph, kSave);
  MemoryReplay replay;
  replay_memory(graph, plan, memory_table(graph, loads), build_timeline(graph, plan), 0, replay);
  context.activation_budget_bytes = replay.peak_bytes;
  BGL_CHECK(replay.peak_bytes >= compute_floor(graph, context.worst_case).activation_bytes,
            replay.peak_bytes);
}

LayerLoad PolicySetup::scaled(double rows, double mean) const {
  const auto balanced = static_cast<double>(kTokens * spec.top_k);
  const auto received = static_cast<int64_t>(std::llround(balanced * rows / mean));
  return {received, std::min(kChunkRows, received)};
}

void drive_timed(const ProvisionContext& context, Policy& policy,
                 const std::vector<LayerLoad>& loads,
                 const std::function<void(const TimedDecision&)>& add) {
  const Graph& graph = *context.graph;
  const MemoryTable table = memory_table(graph, loads);
  std::vector<LayerLoad> known(loads.size(), context.balanced);
  MicrobatchState state = initial_state(graph);
  Plan plan = uniform_plan(graph, kSave);
  Timeline timeline;
  GateInput input;
  input.state = &state;
  input.plan = &plan;
  input.loads = &known;
  for (int gate = -1;;) {
    input.gate = gate;
    if (gate >= 0) {
      const auto layer = static_cast<size_t>(graph.gates[static_cast<size_t>(gate)].layer);
      known[layer] = loads[layer];
      input.load_imbalance =
          static_cast<double>(loads[layer].rows) / static_cast<double>(context.balanced.rows);
    }
    Decision decision;
    const int64_t ns = timed_ns([&] { decision = policy.decide(input); });
    BGL_CHECK(decision.feasible, gate);
    add({gate, ns, decision.cache_hit, decision.mitigated});
    plan = std::move(decision.plan);
    keep_past_choices(graph, state, plan);
    const size_t begin = timeline.size();
    append_demotions(graph, plan, state, timeline);
    gate = append_forward(graph, plan, state, timeline);
    if (gate < 0) append_backward(graph, plan, state, timeline);
    replay_memory(graph, plan, table, timeline, begin, input.memory);
    if (gate < 0) break;
  }
  BGL_CHECK(input.memory.peak_bytes <= context.activation_budget_bytes, input.memory.peak_bytes);
}

std::vector<std::vector<LayerLoad>> spiked_loads(const PolicySetup& setup, int64_t microbatches,
                                                 std::mt19937_64& random) {
  std::uniform_real_distribution<double> calm(0.8, 1.2);
  std::bernoulli_distribution is_spiked(0.3);
  std::vector<std::vector<LayerLoad>> loads(static_cast<size_t>(microbatches));
  for (auto& layers : loads) {
    for (int64_t layer = 0; layer < PolicySetup::kLayers; ++layer) {
      const double factor = calm(random) * (is_spiked(random) ? 2.6 : 1.0);
      layers.push_back(setup.scaled(factor, 1.0));
    }
  }
  return loads;
}

std::vector<std::vector<LayerLoad>> trace_iteration(const PolicySetup& setup,
                                                    const std::filesystem::path& file) {
  constexpr size_t kFirstCount = 3, kFirstExpert = 6, kExperts = 2;  // after step, batch, layer
  std::vector<LayerLoad> layers;
  for (const std::vector<int64_t>& row : read_rows(file)) {
    double sum = 0, here = 0;
    for (size_t i = kFirstCount; i < row.size(); ++i) {
      const size_t expert = i - kFirstCount;
      sum += static_cast<double>(row[i]);
      if (expert >= kFirstExpert && expert < kFirstExpert + kExperts) {
        here += static_cast<double>(row[i]);
      }
    }
    const auto ranks = static_cast<double>((row.size() - kFirstCount) / kExperts);
    layers.push_back(setup.scaled(here, sum / ranks));
  }
  return cut(layers);
}

std::vector<std::vector<LayerLoad>> train_iteration(const PolicySetup& setup,
                                                    const std::filesystem::path& file) {
  constexpr size_t kFirstLayer = 1;  // after the step
  constexpr double kMean = 512;      // 256 tokens, top 2
  std::vector<LayerLoad> layers;
  for (const std::vector<int64_t>& row : read_rows(file)) {
    for (size_t i = kFirstLayer; i < row.size(); ++i) {
      layers.push_back(setup.scaled(static_cast<double>(row[i]), kMean));
    }
  }
  return cut(layers);
}

}  // namespace bagualu
