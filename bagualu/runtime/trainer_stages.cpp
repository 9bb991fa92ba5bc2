#include "bagualu/runtime/trainer_stages.h"

#include <algorithm>
#include <functional>
#include <set>
#include <string>

#include "bagualu/base/units.h"
#include "bagualu/graph/pieces.h"
#include "bagualu/model/static_memory.h"
#include "bagualu/runtime/attention_scratch.h"

namespace bagualu {
namespace {

// Split backwards need their storages in the graph, whether for a pass or to fill gaps.
bool splits_backward(const TrainerOptions& options) {
  return options.overlap || options.layout.pipeline != PipelineKind::k1F1B;
}

int64_t message_bytes(const ModelSpec& spec, const TrainerOptions& options) {
  return round_up(options.shape.tokens() * spec.hidden * dtype_bytes(options.shape.dtype),
                  kAllocationGranularity);
}

int64_t replayed_peak(const std::vector<std::unique_ptr<TrainerStage>>& stages,
                      const RankProgram& program, const LayerLoad& load) {
  std::vector<RankStage> saving;
  std::vector<std::unique_ptr<Policy>> policies;
  // Where passes run in pairs the order inside a pair follows times, which nobody knows yet.
  const OpTime alike{{{0, 1000}}};
  std::vector<CostTable> costs(stages.size());
  std::vector<ProvisionContext> contexts(stages.size());
  for (size_t s = 0; s < stages.size(); ++s) {
    const Graph& graph = stages[s]->graph;
    costs[s].forward.assign(graph.ops.size(), alike);
    costs[s].backward.assign(graph.ops.size(), alike);
    costs[s].rebuild.assign(graph.units.size(), alike);
    contexts[s].graph = &graph;
    contexts[s].cost = &costs[s];
    contexts[s].balanced = contexts[s].worst_case = load;
    policies.push_back(make_policy("save-all", contexts[s], {}));
    saving.push_back({stages[s]->number, &contexts[s], policies[s].get()});
  }
  return replay_rank(saving, {}, program, [&](int, int, int) { return load; }).memory.peak_bytes;
}

}  // namespace

LayerLoad balanced_load(const ModelSpec& spec, const TrainerOptions& options) {
  if (spec.experts == 0) return {};
  const int64_t local = options.layout.experts_local(spec);
  const int64_t rows = options.shape.tokens() * spec.top_k;
  const int64_t per_expert = (rows + local - 1) / local;
  return {rows, std::min(per_expert, options.chunk_rows)};
}

LayerLoad bounding_load(const ModelSpec& spec, const TrainerOptions& options) {
  if (spec.experts == 0) return {};
  return worst_case_load(options.layout.ep_size, options.shape.tokens(), spec.top_k,
                         options.layout.experts_local(spec), options.chunk_rows);
}

NativeGraphOptions graph_options(const TrainerOptions& options) {
  return {.micro_batch_size = options.shape.micro_batch_size,
          .seq = options.shape.seq,
          .dtype = options.shape.dtype,
          .ep_size = options.layout.ep_size};
}

Graph trainer_graph(const ModelSpec& spec, const TrainerOptions& options,
                    const std::optional<StageSlice>& slice) {
  NativeGraphOptions of = graph_options(options);
  of.stage = slice;
  of.split_weight_grads = splits_backward(options);
  Graph graph = build_native_graph(spec, of);
  measure_attention_scratch(spec, options.shape, graph);
  return graph;
}

std::vector<std::unique_ptr<TrainerStage>> make_stages(const ModelSpec& spec,
                                                       const TrainerOptions& options) {
  validate(spec, "model");
  validate(spec, options.shape, options.layout, "layout");
  const std::vector<StageSlice> slices = stage_slices(spec, options.layout);
  std::vector<std::unique_ptr<TrainerStage>> stages;
  for (int64_t number : options.layout.stages_of_rank(options.layout.pp_rank(options.rank))) {
    auto stage = std::make_unique<TrainerStage>();
    stage->number = static_cast<int>(number);
    stage->slice = slices[static_cast<size_t>(number)];
    stage->graph = trainer_graph(spec, options, stage->slice);
    stages.push_back(std::move(stage));
  }
  return stages;
}

PolicyOptions stage_policy_options(const PolicyOptions& options, const Graph& stage,
                                   int64_t in_flight) {
  PolicyOptions of = options;
  of.adapipe_in_flight = std::max(options.adapipe_in_flight, in_flight);
  if (!of.plan.is_object() || !of.plan.contains("units")) return of;
  const Json units = of.plan["units"];
  if (!units.is_object()) return of;
  static const std::set<std::string, std::less<>> ends = {"embedding", "stage_recv", "final_norm",
                                                          "lm_head"};
  for (const auto& [name, value] : units.items()) {
    // Of another stage. What no stage knows stays, to be refused.
    const bool elsewhere = name.rfind("layer", 0) == 0 || ends.contains(name);
    if (elsewhere && stage.find_unit(name) < 0) of.plan["units"].erase(name);
  }
  return of;
}

RankProgram make_program(const TrainerOptions& options, int64_t microbatches) {
  const ParallelLayout& layout = options.layout;
  const OverlapOrder order = make_overlap_order(layout.pipeline, static_cast<int>(layout.pp_size),
                                                static_cast<int>(layout.virtual_per_rank),
                                                static_cast<int>(microbatches), options.overlap);
  return rank_program(order, send_plan(order), static_cast<int>(layout.pp_rank(options.rank)));
}

MemoryForecast forecast_of(const std::vector<std::unique_ptr<TrainerStage>>& stages,
                           const RankProgram& program, const ModelSpec& spec,
                           const TrainerOptions& options) {
  const LayerLoad worst = bounding_load(spec, options), balanced = balanced_load(spec, options);
  const int64_t pp_rank = options.layout.pp_rank(options.rank);
  StaticMemory fixed = static_memory(spec, options.layout, options.shape.dtype, pp_rank);
  add_step_tables(spec, options.layout, options.shape, fixed, pp_rank, most_flights(program));
  MemoryForecast forecast;
  forecast.static_bytes = fixed.total_bytes();
  std::vector<int> numbers;
  std::vector<const Graph*> graphs;
  for (const auto& stage : stages) {
    numbers.push_back(stage->number);
    graphs.push_back(&stage->graph);
  }
  forecast.floor = rank_floor(program, numbers, graphs, worst, message_bytes(spec, options));
  forecast.floor_bytes = forecast.static_bytes + forecast.floor.activation_bytes;
  forecast.host_floor_bytes = forecast.floor.host_bytes;
  forecast.floor_at = forecast.floor.stages.front().at;
  forecast.calm_peak_bytes = forecast.static_bytes + replayed_peak(stages, program, balanced);
  forecast.worst_save_all_bytes = forecast.static_bytes + replayed_peak(stages, program, worst);
  for (size_t s = 0; s < stages.size(); ++s) {
    const std::vector<LayerLoad> loads(static_cast<size_t>(stages[s]->graph.layers), balanced);
    const MicrobatchBytes one =
        microbatch_bytes(stages[s]->graph, uniform_plan(stages[s]->graph, kSave),
                         memory_table(stages[s]->graph, loads));
    forecast.stage_calm_bytes.push_back((forecast.floor.in_flight[s] - 1) * one.rest_bytes +
                                        std::max(one.forward_peak_bytes, one.backward_peak_bytes));
  }
  return forecast;
}

MemoryForecast memory_forecast(const ModelSpec& spec, const TrainerOptions& options) {
  const auto stages = make_stages(spec, options);
  return forecast_of(stages, make_program(options, options.shape.microbatches), spec, options);
}

}  // namespace bagualu
