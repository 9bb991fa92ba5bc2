// Text and JSON forms of a PlanReport.

#include <fmt/format.h>

#include <string_view>

#include "bagualu/base/units.h"
#include "bagualu/cli/plan_report.h"
#include "bagualu/model/parameters.h"

namespace bagualu {
namespace {

constexpr int64_t kFormatVersion = 1;

Json peak_json(const PeakBytes& peak) { return {{"bytes", peak.bytes}, {"at", peak.at}}; }

std::string count_text(int64_t parameters) {
  const double count = static_cast<double>(parameters);
  return count < 1e9 ? fmt::format("{:.2f} M", count / 1e6) : fmt::format("{:.2f} B", count / 1e9);
}

std::string factor_text(double factor) { return fmt::format("{:.2f}x", factor); }

void line(std::ostream& out, std::string_view label, std::string_view value) {
  out << fmt::format("  {:<34}{}\n", label, value);
}

void peak_line(std::ostream& out, const std::string& label, const PeakBytes& peak) {
  line(out, label, fmt::format("{:<12}{}", format_bytes(peak.bytes), peak.at));
}

/// Layers that keep the same bytes stand on one line: "layers 1-3 (moe)".
void print_layers(const std::vector<LayerBytes>& layers, std::ostream& out) {
  for (size_t first = 0; first < layers.size();) {
    size_t next = first + 1;
    while (next < layers.size() && layers[next].kind == layers[first].kind &&
           layers[next].calm_bytes == layers[first].calm_bytes) {
      ++next;
    }
    const LayerBytes& layer = layers[first];
    std::string label = "embedding, final norm, head";
    if (layer.layer >= 0) {
      label = next - first == 1 ? fmt::format("layer {} ({})", layer.layer, layer.kind)
                                : fmt::format("layers {}-{} ({}), each", layer.layer,
                                              layers[next - 1].layer, layer.kind);
    }
    line(out, label,
         fmt::format("{:<12}{}", format_bytes(layer.calm_bytes), format_bytes(layer.loaded_bytes)));
    first = next;
  }
}

void print_policies(const PlanRequest& request, const PlanReport& report, std::ostream& out) {
  out << fmt::format("\npolicies under {}\n  {:<18}{:<20}{:<22}{}\n",
                     format_bytes(request.budget_bytes), "policy", "survives up to",
                     fmt::format("peak at {}", factor_text(request.imbalance)),
                     "extra time per micro-batch (roofline)");
  for (const PolicyOutcome& outcome : report.policies) {
    out << fmt::format(
        "  {:<18}{:<20}{:<22}{}\n", outcome.policy, factor_text(outcome.largest_imbalance),
        fmt::format("{}{}", format_bytes(outcome.peak.bytes), outcome.fits ? "" : " (over)"),
        outcome.fits ? format_ns(outcome.exposed_ns) +
                           (outcome.repeats_step ? ", runs every step twice" : "")
                     : "-");
  }
}

}  // namespace

Json to_json(const PlanRequest& request, const PlanReport& report) {
  Json layers = Json::array();
  for (const LayerBytes& layer : report.layers) {
    layers.push_back({{"layer", layer.layer},
                      {"kind", layer.kind},
                      {"calm_bytes", layer.calm_bytes},
                      {"loaded_bytes", layer.loaded_bytes}});
  }
  Json policies = Json::array();
  for (const PolicyOutcome& outcome : report.policies) {
    policies.push_back({{"policy", outcome.policy},
                        {"largest_imbalance", outcome.largest_imbalance},
                        {"peak", peak_json(outcome.peak)},
                        {"fits", outcome.fits},
                        {"exposed_ns", outcome.exposed_ns},
                        {"repeats_step", outcome.repeats_step}});
  }
  const Json budget = request.budget_bytes > 0 ? Json(request.budget_bytes) : Json(nullptr);
  const Json host = request.host_budget_bytes > 0 ? Json(request.host_budget_bytes) : Json(nullptr);
  Json answer = {{"type", "plan"},
                 {"version", kFormatVersion},
                 {"bagualu", BAGUALU_VERSION},
                 {"model", to_json(request.model)},
                 {"world_size", request.layout.world_size},
                 {"ep", request.layout.ep_size},
                 {"micro_batch_size", request.shape.micro_batch_size},
                 {"seq", request.shape.seq},
                 {"microbatches", request.shape.microbatches},
                 {"dtype", dtype_name(request.shape.dtype)},
                 {"threads", request.threads},
                 {"chunk_rows", request.chunk_rows},
                 {"imbalance", request.imbalance},
                 {"budget_bytes", budget},
                 {"host_budget_bytes", host},
                 {"system", request.system.name},
                 {"static",
                  {{"total_bytes", report.static_memory.total_bytes()},
                   {"dense_bytes", report.static_memory.dense_bytes},
                   {"expert_bytes", report.static_memory.expert_bytes},
                   {"buffer_bytes", report.static_memory.buffer_bytes},
                   {"table_bytes", report.static_memory.table_bytes}}},
                 {"layers", layers},
                 {"calm_peak", peak_json(report.calm_peak)},
                 {"loaded_peak", peak_json(report.loaded_peak)},
                 {"floor", peak_json(report.floor)},
                 {"floor_host_bytes", report.floor_host_bytes},
                 {"worst_imbalance", report.worst_imbalance},
                 {"short_by_bytes", report.short_by_bytes},
                 {"host_short_by_bytes", report.host_short_by_bytes},
                 {"policies", policies}};
  if (report.explanation) answer["explain"] = to_json(*report.explanation);
  return answer;
}

void print_table(const PlanRequest& request, const PlanReport& report, std::ostream& out) {
  const StaticMemory& fixed = report.static_memory;
  const std::string loaded = factor_text(request.imbalance);
  out << fmt::format(
      "{}: {} parameters ({} per token), {} layers, {} experts, top {}\n"
      "{} ranks, experts over {}, {} x {} tokens per micro-batch and rank, {}\n\n",
      request.model.name, count_text(total_parameters(request.model)),
      count_text(active_parameters(request.model)), request.model.layers, request.model.experts,
      request.model.top_k, request.layout.world_size, request.layout.ep_size,
      request.shape.micro_batch_size, request.shape.seq, dtype_name(request.shape.dtype));
  out << "static memory of a rank\n";
  line(out, "dense parameters and their state", format_bytes(fixed.dense_bytes));
  line(out, "local experts and their state", format_bytes(fixed.expert_bytes));
  line(out, "buffers and tables of a step", format_bytes(fixed.buffer_bytes + fixed.table_bytes));
  line(out, "total", format_bytes(fixed.total_bytes()));
  out << fmt::format("\n{:<36}{:<12}{}\n", "saved activations, everything kept", "calm", loaded);
  print_layers(report.layers, out);
  out << fmt::format("\n{:<36}{:<12}{}\n", "peak, static memory included", "bytes", "at");
  peak_line(out, "calm, everything kept", report.calm_peak);
  peak_line(out, loaded + ", everything kept", report.loaded_peak);
  peak_line(out, "floor: any routing survives", report.floor);
  line(out, "  host bytes at the floor", format_bytes(report.floor_host_bytes));
  line(out, "  largest imbalance there can be", factor_text(report.worst_imbalance));
  if (!report.policies.empty()) print_policies(request, report, out);
  if (report.explanation) print_explanation(*report.explanation, out);
}

}  // namespace bagualu
