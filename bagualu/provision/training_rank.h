// What a rank of a training run is as far as bytes and decisions go: its stages, their budgets, its
// program and what it needs at least. The runtime trains with it, a replay of a run log decides
// with it again: both see the same graphs, budgets and policies.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cost/op_cost.h"
#include "bagualu/graph/native_moe.h"
#include "bagualu/model/layout.h"
#include "bagualu/provision/policy_options.h"
#include "bagualu/provision/rank_program.h"

namespace bagualu {

/// Units: *_bytes, 0 = no limit.
struct TrainingSetup {
  int64_t rank = 0;
  ParallelLayout layout;
  TrainShape shape;
  bool overlap = false;  ///< run a forward beside a backward where the order pairs them
  std::string policy = "adaptive";
  PolicyOptions policy_options;
  int64_t budget_bytes = 0;
  int64_t host_budget_bytes = 0;
  int64_t chunk_rows = 256;  ///< rows per expert piece; part of the numerics
  bool allow_quantise = false;
};

/// Reads the fields above, all by their own names ("world_size", "ep_size", "pp_size",
/// "virtual_per_rank", "pipeline", "stage_layers" of the layout; "micro_batch_size", "seq",
/// "microbatches", "dtype" of the shape; "policy_args" for the policy's options).
/// Throws: InvalidInput naming the field.
TrainingSetup read_training_setup(JsonReader& reader);

/// Scratch of ATen's attention kernel, which no formula gives.
struct AttentionScratch {
  int64_t forward_bytes = 0;
  int64_t backward_bytes = 0;
};

/// Puts it into a graph: Workspace::hidden_bytes of every core_attn.
void set_attention_scratch(const AttentionScratch& scratch, Graph& graph);

/// A virtual stage that this rank holds, with what decisions about it are made of.
struct TrainerStage {
  int number = 0;  ///< in the model's order
  StageSlice slice;
  Graph graph;  ///< with the scratch of attention
  CostTable cost;
  ProvisionContext context;
  std::unique_ptr<Policy> policy;

  /// Number of the graph's layer in the model.
  int64_t layer(int64_t local) const { return slice.first_layer + local; }
};

/// The graph of a stage (default: of the whole model).
Graph training_graph(const ModelSpec& spec, const TrainingSetup& setup,
                     const AttentionScratch& scratch,
                     const std::optional<StageSlice>& slice = std::nullopt);

/// The stages of rank `setup.rank`, without costs and policies. The addresses of its members do not
/// change when the vector is moved.
/// Throws: InvalidInput if model, shape and layout do not fit together.
std::vector<std::unique_ptr<TrainerStage>> make_stages(const ModelSpec& spec,
                                                       const TrainingSetup& setup,
                                                       const AttentionScratch& scratch);

/// The options of a stage's policy: of a plan for the model, the units of this stage.
PolicyOptions stage_policy_options(const PolicyOptions& options, const Graph& stage,
                                   int64_t in_flight);

/// The order of passes of all pipeline ranks. Throws: as make_program()
OverlapOrder training_order(const TrainingSetup& setup, int64_t microbatches);

/// What this rank does in a step of so many micro-batches.
/// Throws: InvalidInput if the order does not take that number.
RankProgram make_program(const TrainingSetup& setup, int64_t microbatches);

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
                           const TrainingSetup& setup);

/// Gives every stage its share of the budgets and a new policy. `base_bytes`: what never changes,
/// part of setup.budget_bytes.
/// Returns: the stages as a rank driver takes them; `rank`: the rank's budgets.
/// Requires: the stages have their costs.
std::vector<RankStage> make_policies(const std::vector<std::unique_ptr<TrainerStage>>& stages,
                                     const ModelSpec& spec, const TrainingSetup& setup,
                                     const MemoryForecast& forecast, int64_t base_bytes,
                                     RankOptions& rank);

/// A layer's load when routing is even, and when it is as uneven as it can be.
LayerLoad balanced_load(const ModelSpec& spec, const TrainingSetup& setup);
LayerLoad bounding_load(const ModelSpec& spec, const TrainingSetup& setup);
/// Short form of a plan for logs: the first letter of each unit's residency, then "/eager" and
/// "/late" (reloads not ahead) where the plan says so.
std::string plan_letters(const Plan& plan);
/// Of the whole model: what a profile is keyed by.
NativeGraphOptions graph_options(const TrainingSetup& setup);

}  // namespace bagualu
