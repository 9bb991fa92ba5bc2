#include "bagualu/cli/plan_report.h"

#include <algorithm>

#include "bagualu/cost/roofline.h"
#include "bagualu/graph/native_moe.h"
#include "bagualu/graph/pieces.h"
#include "bagualu/provision/floor.h"
#include "bagualu/provision/policy.h"
#include "bagualu/schedule/replay.h"
#include "bagualu/schedule/timeline.h"

namespace bagualu {
namespace {

/// Rows of a rank whose tokens spread evenly over all experts.
LayerLoad balanced_load(const PlanRequest& request) {
  const int64_t rows = request.shape.tokens() * request.model.top_k;
  const int64_t experts = request.layout.experts_local(request.model);
  std::vector<int64_t> rows_per_expert(static_cast<size_t>(experts), rows / experts);
  for (int64_t e = 0; e < rows % experts; ++e) ++rows_per_expert[static_cast<size_t>(e)];
  return layer_load(rows_per_expert, request.chunk_rows);
}

/// Answers one request; keeps what the answers share.
class Planner {
 public:
  explicit Planner(const PlanRequest& request)
      : request_(request),
        options_{request.shape.micro_batch_size, request.shape.seq, request.shape.dtype,
                 request.layout.ep_size, request.threads},
        graph_(build_native_graph(request.model, options_)),
        costs_(roofline_costs(graph_, request.model, options_, request.system)) {
    report_.static_memory = static_memory(request.model, request.layout, request.shape.dtype);
    add_step_tables(request.model, request.layout, request.shape, report_.static_memory);
    context_.graph = &graph_;
    context_.cost = &costs_;
    context_.host_budget_bytes = request.host_budget_bytes;
    context_.balanced = balanced_load(request);
    context_.worst_case =
        worst_case_load(request.layout.ep_size, request.shape.tokens(), request.model.top_k,
                        request.layout.experts_local(request.model), request.chunk_rows);
  }

  PlanReport answer() {
    report_.worst_imbalance =
        static_cast<double>(context_.worst_case.rows) / static_cast<double>(context_.balanced.rows);
    report_.calm_peak = save_all_peak(loads_at(1.0));
    report_.loaded_peak = save_all_peak(loads_at(request_.imbalance));
    list_layers();
    find_floor();
    if (request_.explain) {
      report_.explanation = explain_plan(graph_, costs_, context_.balanced);
    }
    if (request_.host_budget_bytes > 0) {
      report_.host_short_by_bytes =
          std::max<int64_t>(0, report_.floor_host_bytes - request_.host_budget_bytes);
    }
    if (request_.budget_bytes == 0) return std::move(report_);
    report_.short_by_bytes = std::max<int64_t>(0, report_.floor.bytes - request_.budget_bytes);
    // Under the floor a policy may find no plan at all; the missing bytes are the answer.
    if (report_.short_by_bytes > 0 || report_.host_short_by_bytes > 0) return std::move(report_);
    context_.activation_budget_bytes = request_.budget_bytes - static_bytes();
    for (const std::string& policy : request_.policies) try_policy(policy);
    return std::move(report_);
  }

 private:
  int64_t static_bytes() const { return report_.static_memory.total_bytes(); }

  std::vector<LayerLoad> loads_at(double factor) const {
    return std::vector<LayerLoad>(static_cast<size_t>(graph_.layers),
                                  scaled_load(context_.balanced, context_.worst_case, factor));
  }

  PeakBytes save_all_peak(const std::vector<LayerLoad>& loads) const {
    const Plan plan = uniform_plan(graph_, kSave);
    return peak_of(build_timeline(graph_, plan), plan, loads);
  }

  PeakBytes peak_of(const Timeline& timeline, const Plan& plan,
                    const std::vector<LayerLoad>& loads) const {
    MemoryReplay replay;
    replay_memory(graph_, plan, memory_table(graph_, loads), timeline, 0, replay);
    PeakBytes peak{static_bytes() + replay.peak_bytes, ""};
    if (replay.peak_action >= 0) {
      peak.at = action_text(graph_, timeline[static_cast<size_t>(replay.peak_action)]);
    }
    return peak;
  }

  void list_layers() {
    const std::vector<int64_t> calm = graph_.storage_bytes(loads_at(1.0));
    const std::vector<int64_t> loaded = graph_.storage_bytes(loads_at(request_.imbalance));
    report_.layers.push_back({-1, "ends", 0, 0});
    for (int layer = 0; layer < graph_.layers; ++layer) {
      report_.layers.push_back({layer, request_.model.is_moe(layer) ? "moe" : "dense", 0, 0});
    }
    for (const UnitSpec& unit : graph_.units) {
      LayerBytes& layer = report_.layers[static_cast<size_t>(unit.layer + 1)];
      for (const int storage : unit.storages) {
        layer.calm_bytes += calm[static_cast<size_t>(storage)];
        layer.loaded_bytes += loaded[static_cast<size_t>(storage)];
      }
    }
  }

  void find_floor() {
    const Floor floor = compute_floor(graph_, context_.worst_case);
    report_.floor = {static_bytes() + floor.activation_bytes, floor.at};
    report_.floor_host_bytes = floor.host_bytes;
  }

  void try_policy(const std::string& name) {
    PolicyOptions options;
    if (name == "selective") options.recompute_modules = {"core_attn"};
    PolicyOutcome outcome;
    outcome.policy = name;
    const auto policy = make_policy(name, context_, options);
    const DrivenMicrobatch run = drive_microbatch(context_, *policy, loads_at(request_.imbalance));
    outcome.peak.bytes = static_bytes() + run.memory.peak_bytes;
    if (run.memory.peak_action >= 0) {
      outcome.peak.at =
          action_text(graph_, run.timeline[static_cast<size_t>(run.memory.peak_action)]);
    }
    outcome.fits = outcome.peak.bytes <= request_.budget_bytes &&
                   (request_.host_budget_bytes == 0 ||
                    run.memory.host_peak_bytes <= request_.host_budget_bytes);
    outcome.exposed_ns = run.decisions.back().exposed_ns;
    outcome.repeats_step = run.decisions.back().repeat_step;
    outcome.largest_imbalance = largest_surviving_factor(name, context_, options);
    report_.policies.push_back(std::move(outcome));
  }

  const PlanRequest& request_;
  const NativeGraphOptions options_;
  const Graph graph_;
  const CostTable costs_;
  ProvisionContext context_;
  PlanReport report_;
};

}  // namespace

PlanReport make_plan_report(const PlanRequest& request) { return Planner(request).answer(); }

}  // namespace bagualu
