#include "bagualu/provision/training_rank.h"

#include <algorithm>
#include <functional>
#include <set>
#include <string>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/graph/pieces.h"
#include "bagualu/model/static_memory.h"

namespace bagualu {
namespace {

// Split backwards need their storages in the graph, whether for a pass or to fill gaps.
bool splits_backward(const TrainingSetup& setup) {
  return setup.overlap || setup.layout.pipeline != PipelineKind::k1F1B;
}

int64_t message_bytes(const ModelSpec& spec, const TrainingSetup& setup) {
  return round_up(setup.shape.tokens() * spec.hidden * dtype_bytes(setup.shape.dtype),
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

LayerLoad balanced_load(const ModelSpec& spec, const TrainingSetup& setup) {
  if (spec.experts == 0) return {};
  const int64_t local = setup.layout.experts_local(spec);
  const int64_t rows = setup.shape.tokens() * spec.top_k;
  const int64_t per_expert = (rows + local - 1) / local;
  return {rows, std::min(per_expert, setup.chunk_rows)};
}

LayerLoad bounding_load(const ModelSpec& spec, const TrainingSetup& setup) {
  if (spec.experts == 0) return {};
  return worst_case_load(setup.layout.ep_size, setup.shape.tokens(), spec.top_k,
                         setup.layout.experts_local(spec), setup.chunk_rows);
}

std::string plan_letters(const Plan& plan) {
  std::string text;
  for (const ResidencyId residency : plan.residency) text += residencies()[residency].name.front();
  if (plan.eager_drain) text += "/eager";
  if (!plan.prefetch) text += "/late";
  return text;
}

NativeGraphOptions graph_options(const TrainingSetup& setup) {
  return {.micro_batch_size = setup.shape.micro_batch_size,
          .seq = setup.shape.seq,
          .dtype = setup.shape.dtype,
          .ep_size = setup.layout.ep_size};
}

void set_attention_scratch(const AttentionScratch& scratch, Graph& graph) {
  for (OpSpec& op : graph.ops) {
    if (op.kind != OpKind::kCoreAttn) continue;
    op.fwd_workspace = {.phases = {}, .hidden_bytes = scratch.forward_bytes};
    op.bwd_workspace = {.phases = {}, .hidden_bytes = scratch.backward_bytes};
  }
}

Graph training_graph(const ModelSpec& spec, const TrainingSetup& setup,
                     const AttentionScratch& scratch, const std::optional<StageSlice>& slice) {
  NativeGraphOptions of = graph_options(setup);
  of.stage = slice;
  of.split_weight_grads = splits_backward(setup);
  Graph graph = build_native_graph(spec, of);
  set_attention_scratch(scratch, graph);
  return graph;
}

std::vector<std::unique_ptr<TrainerStage>> make_stages(const ModelSpec& spec,
                                                       const TrainingSetup& setup,
                                                       const AttentionScratch& scratch) {
  validate(spec, "model");
  validate(spec, setup.shape, setup.layout, "layout");
  const std::vector<StageSlice> slices = stage_slices(spec, setup.layout);
  std::vector<std::unique_ptr<TrainerStage>> stages;
  for (int64_t number : setup.layout.stages_of_rank(setup.layout.pp_rank(setup.rank))) {
    auto stage = std::make_unique<TrainerStage>();
    stage->number = static_cast<int>(number);
    stage->slice = slices[static_cast<size_t>(number)];
    stage->graph = training_graph(spec, setup, scratch, stage->slice);
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

OverlapOrder training_order(const TrainingSetup& setup, int64_t microbatches) {
  const ParallelLayout& layout = setup.layout;
  return make_overlap_order(layout.pipeline, static_cast<int>(layout.pp_size),
                            static_cast<int>(layout.virtual_per_rank),
                            static_cast<int>(microbatches), setup.overlap);
}

RankProgram make_program(const TrainingSetup& setup, int64_t microbatches) {
  const OverlapOrder order = training_order(setup, microbatches);
  return rank_program(order, send_plan(order), static_cast<int>(setup.layout.pp_rank(setup.rank)));
}

MemoryForecast forecast_of(const std::vector<std::unique_ptr<TrainerStage>>& stages,
                           const RankProgram& program, const ModelSpec& spec,
                           const TrainingSetup& setup) {
  const LayerLoad worst = bounding_load(spec, setup), balanced = balanced_load(spec, setup);
  const int64_t pp_rank = setup.layout.pp_rank(setup.rank);
  StaticMemory fixed = static_memory(spec, setup.layout, setup.shape.dtype, pp_rank);
  add_step_tables(spec, setup.layout, setup.shape, fixed, pp_rank, most_flights(program));
  MemoryForecast forecast;
  forecast.static_bytes = fixed.total_bytes();
  std::vector<int> numbers;
  std::vector<const Graph*> graphs;
  for (const auto& stage : stages) {
    numbers.push_back(stage->number);
    graphs.push_back(&stage->graph);
  }
  forecast.floor = rank_floor(program, numbers, graphs, worst, message_bytes(spec, setup));
  forecast.floor_bytes = forecast.static_bytes + forecast.floor.activation_bytes;
  forecast.host_floor_bytes = forecast.floor.host_bytes;
  forecast.floor_at = forecast.floor.stages.front().at;
  forecast.calm_peak_bytes = forecast.static_bytes + replayed_peak(stages, program, balanced);
  forecast.worst_save_all_bytes = forecast.static_bytes + replayed_peak(stages, program, worst);
  forecast.stage_calm_bytes = stage_calm_bytes(forecast.floor, graphs, balanced);
  return forecast;
}

std::vector<RankStage> make_policies(const std::vector<std::unique_ptr<TrainerStage>>& stages,
                                     const ModelSpec& spec, const TrainingSetup& setup,
                                     const MemoryForecast& forecast, int64_t base_bytes,
                                     RankOptions& rank) {
  rank.activation_budget_bytes =
      setup.budget_bytes > 0 ? std::max<int64_t>(setup.budget_bytes - base_bytes, 1) : 0;
  rank.host_budget_bytes = setup.host_budget_bytes;
  const std::vector<int64_t> budgets =
      stage_budgets(forecast.floor, forecast.stage_calm_bytes, rank.activation_budget_bytes);
  std::vector<RankStage> list;
  for (size_t s = 0; s < stages.size(); ++s) {
    TrainerStage& stage = *stages[s];
    stage.context.graph = &stage.graph;
    stage.context.cost = &stage.cost;
    stage.context.activation_budget_bytes = budgets[s];
    stage.context.host_budget_bytes = setup.host_budget_bytes / static_cast<int64_t>(stages.size());
    stage.context.balanced = balanced_load(spec, setup);
    stage.context.worst_case = bounding_load(spec, setup);
    stage.context.allow_quantise = setup.allow_quantise;
    stage.policy = make_policy(
        setup.policy, stage.context,
        stage_policy_options(setup.policy_options, stage.graph, forecast.floor.in_flight[s]));
    list.push_back({stage.number, &stage.context, stage.policy.get()});
  }
  return list;
}

}  // namespace bagualu
