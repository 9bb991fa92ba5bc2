#include <ATen/ATen.h>

#include <algorithm>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/model/static_memory.h"
#include "bagualu/runtime/attention_scratch.h"
#include "bagualu/runtime/trainer.h"

namespace bagualu {
namespace {

int64_t replayed_peak(const Graph& graph, const Plan& plan, const LayerLoad& load) {
  const std::vector<LayerLoad> loads(graph.layers, load);
  MemoryReplay replay;
  replay_memory(graph, plan, memory_table(graph, loads), build_timeline(graph, plan), 0, replay);
  return replay.peak_bytes;
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

MemoryForecast forecast_of(const Graph& graph, const ModelSpec& spec,
                           const TrainerOptions& options) {
  const LayerLoad worst = bounding_load(spec, options);
  StaticMemory fixed = static_memory(spec, options.layout, options.shape.dtype);
  add_step_tables(spec, options.layout, options.shape, fixed);
  MemoryForecast forecast;
  forecast.static_bytes = fixed.total_bytes();
  const Floor floor = compute_floor(graph, worst);
  forecast.floor_bytes = forecast.static_bytes + floor.activation_bytes;
  forecast.host_floor_bytes = floor.host_bytes;
  forecast.floor_at = floor.at;
  const Plan save_all = uniform_plan(graph, kSave);
  forecast.calm_peak_bytes =
      forecast.static_bytes + replayed_peak(graph, save_all, balanced_load(spec, options));
  forecast.worst_save_all_bytes =
      forecast.static_bytes + replayed_peak(graph, save_all, worst);
  return forecast;
}

NativeGraphOptions graph_options(const TrainerOptions& options) {
  return {.micro_batch_size = options.shape.micro_batch_size,
          .seq = options.shape.seq,
          .dtype = options.shape.dtype,
          .ep_size = options.layout.ep_size};
}

Graph trainer_graph(const ModelSpec& spec, const TrainerOptions& options) {
  Graph graph = build_native_graph(spec, graph_options(options));
  measure_attention_scratch(spec, options.shape, graph);
  return graph;
}

MemoryForecast memory_forecast(const ModelSpec& spec, const TrainerOptions& options) {
  validate(spec, options.shape, options.layout, "layout");
  return forecast_of(trainer_graph(spec, options), spec, options);
}

BudgetBelowFloor::BudgetBelowFloor(int64_t budget_bytes, int64_t floor_bytes,
                                   const std::string& what_would_fit)
    : std::runtime_error("budget " + format_bytes(budget_bytes) + " (" +
                         std::to_string(budget_bytes) + " bytes) is below the floor " +
                         format_bytes(floor_bytes) + " (" + std::to_string(floor_bytes) +
                         " bytes): " + std::to_string(floor_bytes - budget_bytes) +
                         " bytes missing; " + what_would_fit),
      budget_bytes(budget_bytes),
      floor_bytes(floor_bytes) {}

}  // namespace bagualu
