#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bagualu/cost/op_cost.h"
#include "bagualu/graph/native_moe.h"
#include "bagualu/provision/rank_program.h"
#include "bagualu/runtime/trainer_options.h"

namespace bagualu {

/// A virtual stage that this rank holds, with what decisions about it are made of.
struct TrainerStage {
  int number = 0;  ///< in the model's order
  StageSlice slice;
  Graph graph;  ///< with the measured scratch of attention
  CostTable cost;
  ProvisionContext context;
  std::unique_ptr<Policy> policy;

  /// Number of the graph's layer in the model.
  int64_t layer(int64_t local) const { return slice.first_layer + local; }
};

/// The graph of a stage (default: of the whole model), with the measured scratch of attention.
Graph trainer_graph(const ModelSpec& spec, const TrainerOptions& options,
                    const std::optional<StageSlice>& slice = std::nullopt);

/// The stages of rank `options.rank`, without costs and policies. Measures attention's scratch.
/// The addresses of its members do not change when the vector is moved.
std::vector<std::unique_ptr<TrainerStage>> make_stages(const ModelSpec& spec,
                                                       const TrainerOptions& options);

/// The options of a stage's policy: of a plan for the model, the units of this stage.
PolicyOptions stage_policy_options(const PolicyOptions& options, const Graph& stage,
                                   int64_t in_flight);

/// What this rank does in a step of so many micro-batches.
/// Throws: InvalidInput if the order does not take that number.
RankProgram make_program(const TrainerOptions& options, int64_t microbatches);

/// Device and host bytes a rank needs, before anything is allocated.
struct MemoryForecast {
  int64_t static_bytes = 0;  ///< parameters, gradients, optimizer, tables, one step's tokens
  int64_t floor_bytes = 0;   ///< static_bytes + the survival plans at the worst routing
  int64_t host_floor_bytes = 0;
  int64_t calm_peak_bytes = 0;       ///< static_bytes + save-all at even routing
  int64_t worst_save_all_bytes = 0;  ///< static_bytes + save-all at the worst routing
  std::string floor_at;
  RankFloor floor;
  std::vector<int64_t> stage_calm_bytes;  ///< by stage: what it holds at most in calm
};

MemoryForecast forecast_of(const std::vector<std::unique_ptr<TrainerStage>>& stages,
                           const RankProgram& program, const ModelSpec& spec,
                           const TrainerOptions& options);

/// The forecast of a rank, from its options alone (measures ATen's attention scratch).
/// Throws: InvalidInput
MemoryForecast memory_forecast(const ModelSpec& spec, const TrainerOptions& options);

/// A layer's load when routing is even, and when it is as uneven as it can be.
LayerLoad balanced_load(const ModelSpec& spec, const TrainerOptions& options);
LayerLoad bounding_load(const ModelSpec& spec, const TrainerOptions& options);
/// Of the whole model: what a profile is keyed by.
NativeGraphOptions graph_options(const TrainerOptions& options);

}  // namespace bagualu
