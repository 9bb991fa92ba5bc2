#include "bagualu/runtime/trainer_json.h"

#include <algorithm>
#include <map>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

void read_spikes(const Json& list, const ModelSpec& spec, const TrainerOptions& options,
                 const StepInput& step, std::vector<RoutingOverride>& routing) {
  for (const Json& item : list) {
    JsonReader reader(item, "extras: spikes");
    const std::vector<int64_t> layers = reader.int64_list("layers", 0, spec.layers - 1);
    Spike spike;
    spike.factor = reader.number("factor", 1.0, static_cast<double>(options.layout.ep_size));
    // Another rank each time, so that no rank is special.
    spike.hot_rank = reader.int64_or("hot_rank", step.step % options.layout.ep_size, 0,
                                     options.layout.ep_size - 1);
    reader.finish();
    for (RoutingOverride& microbatch : routing) {
      microbatch.spikes.resize(spec.layers);
      for (int64_t layer : layers) {
        if (spec.is_moe(layer)) microbatch.spikes[layer] = spike;
      }
    }
  }
}

std::string residency_text(ResidencyId id) { return std::string(residencies()[id].name); }

const Graph& graph_of(const Trainer& trainer, const MicrobatchReport& microbatch) {
  return trainer.stages()[static_cast<size_t>(microbatch.stage)]->graph;
}

Json residency_counts(const Trainer& trainer, const StepReport& report) {
  std::map<std::string, int64_t> counts;
  for (const char* name : {"save", "recompute", "offload"}) counts[name] = 0;
  for (const MicrobatchReport& microbatch : report.passes.microbatches) {
    const Graph& graph = graph_of(trainer, microbatch);
    for (size_t u = 0; u < graph.units.size(); ++u) {
      if (!graph.units[u].pinned) ++counts[residency_text(microbatch.plan.residency[u])];
    }
  }
  return counts;
}

Json mitigation_actions(const Graph& graph, const MicrobatchReport& microbatch,
                        const DecisionRecord& decision) {
  Json actions = Json::array();
  for (int unit : decision.changed_units) {
    int64_t bytes = 0;
    for (int s : graph.units[unit].storages) {
      const int layer = graph.storages[s].layer;
      const bool routed = layer >= 0 && microbatch.routing[static_cast<size_t>(layer)].has_value();
      LayerLoad load;
      if (routed) load.rows = microbatch.routing[static_cast<size_t>(layer)]->load.rows;
      bytes += graph.storages[s].bytes.eval(graph.tokens, load);
    }
    actions.push_back({{"unit", graph.units[unit].name},
                       {"residency", residency_text(microbatch.plan.residency[unit])},
                       {"bytes", bytes}});
  }
  return actions;
}

void append_mitigations(const Trainer& trainer, const std::vector<MicrobatchReport>& microbatches,
                        Json& list) {
  for (const MicrobatchReport& microbatch : microbatches) {
    const TrainerStage& stage = *trainer.stages()[static_cast<size_t>(microbatch.stage)];
    for (const DecisionRecord& decision : microbatch.decisions) {
      if (!decision.mitigated || decision.changed_units.empty()) continue;
      const int64_t layer =
          decision.gate < 0
              ? -1
              : stage.layer(stage.graph.gates[static_cast<size_t>(decision.gate)].layer);
      list.push_back({{"microbatch", microbatch.microbatch},
                      {"layer", layer},
                      {"load_imbalance", decision.load_imbalance},
                      {"needed_bytes", decision.needed_bytes},
                      {"actions", mitigation_actions(stage.graph, microbatch, decision)},
                      {"cost_ns", decision.exposed_ns}});
    }
  }
}

Json mitigations(const Trainer& trainer, const StepReport& report) {
  Json list = Json::array();
  append_mitigations(trainer, report.discarded, list);
  append_mitigations(trainer, report.passes.microbatches, list);
  return list;
}

// By layer of the model, the most rows this rank's experts got in one micro-batch.
std::vector<int64_t> most_rows(const Trainer& trainer, const StepReport& report) {
  std::vector<int64_t> rows(report.imbalance.size(), 0);
  for (const MicrobatchReport& microbatch : report.passes.microbatches) {
    const TrainerStage& stage = *trainer.stages()[static_cast<size_t>(microbatch.stage)];
    for (const GateSpec& gate : stage.graph.gates) {
      int64_t& most = rows[static_cast<size_t>(stage.layer(gate.layer))];
      most = std::max(most, microbatch.routing[static_cast<size_t>(gate.layer)]->load.rows);
    }
  }
  return rows;
}

// By micro-batch and stage: rows and largest piece of every layer with experts.
Json loads_to_json(const Trainer& trainer, const StepReport& report) {
  Json list = Json::array();
  for (const MicrobatchReport& microbatch : report.passes.microbatches) {
    Json loads = Json::array();
    for (const GateSpec& gate : graph_of(trainer, microbatch).gates) {
      const LayerLoad& load = microbatch.routing[static_cast<size_t>(gate.layer)]->load;
      loads.push_back(load.rows);
      loads.push_back(load.piece_rows);
    }
    list.push_back(std::move(loads));
  }
  return list;
}

// Plans as they were carried out. Most micro-batches share one: each is written once.
void append_plans(const StepReport& report, Json& step) {
  std::vector<std::string> texts;
  Json plan_of = Json::array();
  for (const MicrobatchReport& microbatch : report.passes.microbatches) {
    const std::string text = plan_letters(microbatch.plan);
    const auto at = std::find(texts.begin(), texts.end(), text);
    plan_of.push_back(at - texts.begin());
    if (at == texts.end()) texts.push_back(text);
  }
  step["plans"] = texts;
  step["plan_of"] = plan_of;
}

Json pass_bytes_to_json(const StepReport& report) {
  Json list = Json::array();
  for (const PassBytes& pass : report.pass_bytes) {
    list.push_back({pass.peak_bytes, pass.live_bytes});
  }
  return list;
}

void append_units(const TrainerStage& stage, Json& units) {
  const Graph& graph = stage.graph;
  for (size_t u = 0; u < graph.units.size(); ++u) {
    Json allowed = Json::array();
    for (size_t r = 0; r < residencies().size(); ++r) {
      const auto residency = static_cast<ResidencyId>(r);
      if (uniform_plan(graph, residency).residency[u] == residency) {
        allowed.push_back(residency_text(residency));
      }
    }
    units.push_back({{"name", graph.units[u].name},
                     {"layer", graph.units[u].layer < 0 ? -1 : stage.layer(graph.units[u].layer)},
                     {"allowed", allowed}});
  }
}

void append_times(const StepReport& report, Json& step) {
  if (!report.times) return;
  const StepOverlap& overlap = report.times->overlap;
  step["overlapped_segments"] = report.passes.overlapped_segments;
  step["serialised_segments"] = report.passes.serialised_segments;
  step["deferred_passes"] = report.passes.deferred_passes;
  step["undeferred_passes"] = report.passes.undeferred_passes;
  step["compute_ns"] = overlap.compute_ns;
  step["comm_ns"] = overlap.comm_ns;
  step["comm_beside_ns"] = overlap.comm_beside_ns;
  step["comm_wait_ns"] = overlap.comm_wait_ns;
  step["copy_ns"] = overlap.copy_ns;
  step["copy_beside_ns"] = overlap.copy_beside_ns;
  step["copy_wait_ns"] = overlap.copy_wait_ns;
  step["p2p_wait_ns"] = report.times->p2p_wait_ns;
  step["bubble_ns"] = report.times->bubble_ns;
}

}  // namespace

void read_step_extras(const Json& extras, const ModelSpec& spec, const TrainerOptions& options,
                      int64_t microbatches, StepInput& input) {
  JsonReader reader(extras, "extras");
  const Json& spikes = reader.raw("spikes");
  const Json& recorded = reader.raw("routing");
  input.want_memory = reader.has("want_memory") && reader.boolean("want_memory");
  if (reader.has("trace_path")) input.trace_path = reader.string("trace_path");
  input.stop_requested = reader.has("stop_requested") && reader.boolean("stop_requested");
  reader.finish();
  const bool has_spikes = spikes.is_array() && !spikes.empty();
  const bool has_recorded = recorded.is_array() && !recorded.empty();
  if (!has_spikes && !has_recorded) return;
  input.routing.resize(microbatches);
  if (has_recorded) {
    if (static_cast<int64_t>(recorded.size()) != microbatches) {
      throw InvalidInput("extras", "routing", std::to_string(recorded.size()) + " micro-batches",
                         std::to_string(microbatches));
    }
    for (int64_t m = 0; m < microbatches; ++m) {
      input.routing[m].tokens_per_expert = recorded[m].get<std::vector<std::vector<int64_t>>>();
      input.routing[m].tokens_per_expert.resize(spec.layers);
    }
  }
  if (has_spikes) read_spikes(spikes, spec, options, input, input.routing);
}

Json step_to_json(const Trainer& trainer, const StepReport& report) {
  int64_t recomputed = 0, offloaded = 0, encoded = 0, wait_ns = 0, cache_hits = 0, host_peak = 0,
          unaccounted = 0;
  Json decision_ns = Json::array(), peaks = Json::array();
  const auto add = [&](const MicrobatchReport& microbatch) {
    recomputed += microbatch.store.bytes_recomputed;
    offloaded += microbatch.store.bytes_offloaded;
    encoded += microbatch.store.bytes_encoded;
    wait_ns += microbatch.store.wait_ns;
    host_peak = std::max(host_peak, microbatch.host_peak_bytes);
    unaccounted = std::max(unaccounted, microbatch.unaccounted_bytes);
    peaks.push_back({microbatch.predicted_peak_bytes, microbatch.measured_peak_bytes});
    for (const DecisionRecord& decision : microbatch.decisions) {
      decision_ns.push_back(decision.duration_ns);
      cache_hits += decision.cache_hit ? 1 : 0;
    }
  };
  for (const MicrobatchReport& microbatch : report.discarded) add(microbatch);
  for (const MicrobatchReport& microbatch : report.passes.microbatches) add(microbatch);
  Json memory = nullptr;
  if (!report.memory.empty()) {
    memory = Json::array();
    for (const MemorySample& sample : report.memory) {
      memory.push_back({sample.at_ns, sample.live_bytes, sample.action});
    }
  }
  Json step = {{"rank", trainer.options().rank},
               {"peak_bytes", report.measured_peak_bytes},
               {"predicted_peak_bytes", report.predicted_peak_bytes},
               {"microbatch_peaks", peaks},
               {"unaccounted_bytes", unaccounted},
               {"end_bytes", report.end_bytes},
               {"host_end_bytes", report.host_end_bytes},
               {"host_peak_bytes", host_peak},
               {"rows", most_rows(trainer, report)},
               {"residencies", residency_counts(trainer, report)},
               {"bytes_recomputed", recomputed},
               {"bytes_offloaded", offloaded},
               {"bytes_encoded", encoded},
               {"wait_ns", wait_ns},
               {"decision_ns", decision_ns},
               {"cache_hits", cache_hits},
               {"comm_ns", report.comm_ns},
               {"loss", report.loss},
               {"aux_loss", report.aux_loss},
               {"z_loss", report.z_loss},
               {"grad_norm", report.grad_norm},
               {"imbalance", report.imbalance},
               {"mitigations", mitigations(trainer, report)},
               {"stop", report.stop},
               {"repeated", report.repeated},
               {"memory", memory}};
  step["loads"] = loads_to_json(trainer, report);
  append_plans(report, step);
  step["pass_bytes"] = pass_bytes_to_json(report);
  step["passes_ns"] = report.passes_end_ns - report.begin_ns;
  step["step_ns"] = report.end_ns - report.begin_ns;
  append_times(report, step);
  return step;
}

Json start_to_json(const Trainer& trainer) {
  Json scratch = Json::array({0, 0});
  for (const OpSpec& op : trainer.stages().front()->graph.ops) {
    if (op.kind != OpKind::kCoreAttn) continue;
    scratch = {op.fwd_workspace.hidden_bytes, op.bwd_workspace.hidden_bytes};
  }
  return {{"attention_scratch_bytes", scratch}, {"profile", trainer.profile()}};
}

Json units_to_json(const Trainer& trainer) {
  Json units = Json::array();
  for (const auto& stage : trainer.stages()) append_units(*stage, units);
  return units;
}

Json to_json(const MemoryForecast& forecast) {
  return {{"static_bytes", forecast.static_bytes},
          {"floor_bytes", forecast.floor_bytes},
          {"host_floor_bytes", forecast.host_floor_bytes},
          {"calm_peak_bytes", forecast.calm_peak_bytes},
          {"worst_save_all_bytes", forecast.worst_save_all_bytes},
          {"floor_at", forecast.floor_at}};
}

}  // namespace bagualu
