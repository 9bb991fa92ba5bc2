// Text and JSON forms of a JobPlanReport.

#include <fmt/format.h>

#include <string_view>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/cli/plan_job.h"
#include "bagualu/model/parameters.h"
#include "bagualu/model/strategy.h"

namespace bagualu {
namespace {

constexpr int64_t kFormatVersion = 1;
constexpr size_t kShownActions = 8;
constexpr size_t kShownTensors = 10;

std::string count_text(int64_t parameters) {
  const double count = static_cast<double>(parameters);
  return count < 1e9 ? fmt::format("{:.2f} M", count / 1e6) : fmt::format("{:.2f} B", count / 1e9);
}

std::string factor_text(double factor) { return fmt::format("{:.2f}x", factor); }

std::string percent(double part, double whole) {
  return whole <= 0 ? "-" : fmt::format("{:.1f} %", 100 * part / whole);
}

std::string signed_bytes(int64_t bytes) {
  return (bytes > 0 ? "+" : "") + (bytes == 0 ? "0" : format_bytes(bytes));
}

std::string signed_ns(int64_t ns) { return (ns < 0 ? "-" : "+") + format_ns(ns < 0 ? -ns : ns); }

std::string cause_text(const PeakCause& cause) {
  return fmt::format("{} in {}", cause.op, pass_text(cause.pass));
}

std::string recompute_text(const RecomputeSettings& settings) {
  if (settings.granularity == RecomputeGranularity::kNone) return "nothing recomputed";
  if (settings.granularity == RecomputeGranularity::kFull) {
    return fmt::format("layers recomputed ({} {})", settings.block ? "block" : "uniform",
                       settings.layers);
  }
  return fmt::format("recompute {}", fmt::join(settings.modules, ", "));
}

void print_names(const char* label, const std::vector<std::string>& names, std::ostream& out) {
  if (!names.empty()) out << fmt::format("{}: {}\n", label, fmt::join(names, ", "));
}

void print_asked_job(const Job& job, std::ostream& out) {
  out << fmt::format("\n{} ranks: {}; {}, stages {}\n", job.layout.world_size,
                     layout_text(job.layout), pipeline_kind_name(job.pipeline),
                     stages_text(job.stages));
  out << fmt::format("{} x {} tokens per micro-batch, {} micro-batches per step; {}",
                     job.micro_batch_size, job.seq, job.microbatches,
                     recompute_text(job.recompute));
  if (!job.offload.modules.empty()) {
    out << fmt::format("; offload {} ({:.0f} %)", fmt::join(job.offload.modules, ", "),
                       100 * job.offload.fraction);
  }
}

void print_head(const JobPlanRequest& request, const JobPlanReport& report, std::ostream& out) {
  const Job& job = request.job;
  const ModelSpec& model = job.model;
  out << fmt::format("{}: {} parameters ({} per token), {} layers", model.name,
                     count_text(total_parameters(model)), count_text(active_parameters(model)),
                     model.layers);
  if (model.has_moe()) out << fmt::format(", {} experts, top {}", model.experts, model.top_k);
  if (request.search_alone) {
    out << fmt::format("\n{} ranks, {} tokens per sequence, {} sequences per step",
                       job.layout.world_size, job.seq,
                       job.micro_batch_size * job.microbatches * job.layout.dp());
  } else {
    print_asked_job(job, out);
  }
  out << fmt::format("\nsystem {} ({})", request.system.name, request.system.provenance);
  if (request.budget_bytes > 0) {
    out << fmt::format(", budget {}{}", format_bytes(request.budget_bytes),
                       request.budget_of_system ? " (the device's memory)" : "");
  }
  if (model.has_moe() && !request.search_alone) {
    out << fmt::format("; largest imbalance there can be {}", factor_text(report.worst_imbalance));
  }
  out << '\n';
  print_names("not modelled, so not in these figures", request.unmodelled, out);
  print_names("ignored, no effect on memory or time", request.ignored, out);
}

void print_ranks(const JobPlanRequest& request, const JobPlanReport& report, std::ostream& out) {
  const bool budget = request.budget_bytes > 0;
  const std::string loaded = report.loads.spikes.empty() && report.loads.by_layer.empty()
                                 ? factor_text(report.loads.factor)
                                 : "as asked";
  size_t width = 14;
  for (const JobRank& rank : report.ranks) width = std::max(width, rank.content.size());
  out << fmt::format("\n{:<6}{:<{}}{:<11}{:<11}{:<12}{:<16}{:<11}{:<10}{}\n", "rank", "holds",
                     width + 2, "static", "in flight", "peak 1.00x", "peak " + loaded, "worst",
                     budget ? "survives" : "", "cause of the peak");
  for (const JobRank& rank : report.ranks) {
    const bool over = budget && rank.loaded.peak_bytes > request.budget_bytes;
    out << fmt::format("{:<6}{:<{}}{:<11}{:<11}{:<12}{:<16}{:<11}{:<10}{}\n", rank.pp_rank,
                       rank.content, width + 2, format_bytes(rank.static_bytes),
                       rank.loaded.in_flight, format_bytes(rank.calm.peak_bytes),
                       format_bytes(rank.loaded.peak_bytes) + (over ? " over" : ""),
                       format_bytes(rank.worst_bytes),
                       budget ? factor_text(rank.survivable_factor) : "",
                       cause_text(rank.loaded.cause));
  }
}

void print_peak(const JobPlanRequest& request, const JobPlanReport& report, std::ostream& out) {
  const JobRank& rank = report.ranks[report.heaviest];
  const PeakCause& cause = rank.loaded.cause;
  out << fmt::format(
      "\nheaviest: rank {}, {} while {} runs {} of micro-batch {} in virtual stage {}\n",
      rank.pp_rank, format_bytes(rank.loaded.peak_bytes), cause.op,
      cause.pass.kind == PassKind::kForward ? "forward" : "backward", cause.pass.microbatch,
      cause.pass.stage);
  for (const KindBytes& kind : rank.loaded.by_kind) {
    out << fmt::format(
        "  {:<28}{:<12}{}\n", kind.kind, format_bytes(kind.bytes),
        percent(static_cast<double>(kind.bytes), static_cast<double>(rank.loaded.peak_bytes)));
  }
  out << "largest tensors alive then\n";
  for (size_t i = 0; i < std::min(rank.loaded.largest.size(), kShownTensors); ++i) {
    const TensorRow& tensor = rank.loaded.largest[i];
    out << fmt::format("  {:<28}{:<12}{} x {}\n", tensor.name, format_bytes(tensor.bytes),
                       tensor.count, tensor.formula);
  }
  if (request.budget_bytes == 0) return;
  out << fmt::format("with every layer recomputed, {} survive any routing\n",
                     format_bytes(report.floor_bytes));
}

void print_time(const JobPlanReport& report, std::ostream& out) {
  const JobTime& time = report.time;
  const auto whole = static_cast<double>(time.iteration_ns);
  const auto share = [&](int64_t ns) { return percent(static_cast<double>(ns), whole); };
  out << fmt::format(
      "\niteration {} predicted ({} with a balanced router): {:.0f} tokens/s, {:.0f} TFLOP/s per "
      "device, MFU {:.1f} %\n",
      format_ns(time.iteration_ns), format_ns(report.calm_time.iteration_ns), time.tokens_per_s,
      time.model_flops_per_s_per_device / 1e12, 100 * time.mfu_fraction);
  out << fmt::format(
      "  bubbles {}, exposed communication {}, recompute {}, exposed offload {}, gradients {}, "
      "parameters {}, optimizer {}\n",
      share(time.bubble_ns), share(time.exposed_communication_ns), share(time.recompute_ns),
      share(time.exposed_offload_ns), share(time.gradient_reduce_ns),
      share(time.parameter_gather_ns), share(time.optimizer_ns));
}

void print_actions(const JobPlanRequest& request, const JobPlanReport& report, std::ostream& out) {
  if (report.actions.empty()) return;
  const bool budget = request.budget_bytes > 0;
  out << fmt::format("\n{:<30}{:<16}{:<18}{}\n", "one action more", "peak", "iteration",
                     budget ? "then survives" : "");
  for (size_t i = 0; i < std::min(report.actions.size(), kShownActions); ++i) {
    const JobAction& action = report.actions[i];
    out << fmt::format("{:<30}{:<16}{:<18}{}\n", action.name,
                       signed_bytes(action.peak_change_bytes),
                       action.time_change_ns == 0 ? "0" : signed_ns(action.time_change_ns),
                       budget ? factor_text(action.survivable_factor) : "");
  }
}

void print_forecast(const char* label, const OomForecast& forecast, std::ostream& out) {
  out << fmt::format(
      "{}: {} of {} iterations over the budget; {:.2f} expected in 1,000, at least one with "
      "probability {:.3f}; largest peak {} (rank {}, iteration {})\n",
      label, forecast.iterations_over, forecast.iterations, forecast.per_1000,
      forecast.at_least_one_in_1000, format_bytes(forecast.worst_peak_bytes),
      forecast.worst_pp_rank, forecast.worst_iteration);
}

void print_points(const SearchResult& search, const std::vector<SearchPoint>& points,
                  std::ostream& out) {
  for (const SearchPoint& point : points) {
    const bool timed = point.iteration_ns > 0;  // not of one that does not fit
    out << fmt::format("{:<44}{:<14}{:<5}{:<32}{:<12}{:<8}{:<12}{}\n", layout_text(point.layout),
                       pipeline_kind_name(point.pipeline), point.micro_batch_size,
                       search.recompute[point.recompute].name,
                       timed ? format_ns(point.iteration_ns) : "-",
                       timed ? fmt::format("{:.1f} %", 100 * point.mfu_fraction) : "-",
                       format_bytes(point.peak_bytes), factor_text(point.survivable_factor));
  }
}

void print_search(const SearchResult& search, std::ostream& out) {
  out << fmt::format("\nsearch: {} configurations, {} fit\n", search.configurations,
                     search.fitting);
  if (search.fitting == 0) {
    if (search.configurations == 0) return;
    out << fmt::format("nearest, {} too large:\n", format_bytes(search.short_by_bytes));
    print_points(search, {search.nearest}, out);
    return;
  }
  out << fmt::format("{:<44}{:<14}{:<5}{:<32}{:<12}{:<8}{:<12}{}\n", "fastest", "order", "mbs",
                     "recompute", "iteration", "MFU", "peak", "survives");
  print_points(search, search.best, out);
  out << "throughput against survivable imbalance: each survives more than every faster one\n";
  print_points(search, search.pareto, out);
}

Json memory_json(const RankMemory& memory) {
  Json kinds = Json::object();
  for (const KindBytes& kind : memory.by_kind) kinds[kind.kind] = kind.bytes;
  Json largest = Json::array();
  for (const TensorRow& tensor : memory.largest) {
    largest.push_back({{"name", tensor.name},
                       {"op", tensor.op},
                       {"formula", tensor.formula},
                       {"count", tensor.count},
                       {"bytes", tensor.bytes}});
  }
  return {{"peak_bytes", memory.peak_bytes},
          {"communication_bytes", memory.communication_bytes},
          {"reserved_bytes", memory.reserved_bytes},
          {"in_flight", memory.in_flight},
          {"cause",
           {{"pass", pass_text(memory.cause.pass)},
            {"virtual_stage", memory.cause.pass.stage},
            {"microbatch", memory.cause.pass.microbatch},
            {"layer", memory.cause.layer},
            {"op", memory.cause.op}}},
          {"by_kind", kinds},
          {"largest", largest}};
}

Json time_json(const JobTime& time) {
  return {{"iteration_ns", time.iteration_ns},
          {"mfu_fraction", time.mfu_fraction},
          {"tokens_per_s", time.tokens_per_s},
          {"model_flops_per_s_per_device", time.model_flops_per_s_per_device},
          {"pipeline_ns", time.pipeline_ns},
          {"bubble_ns", time.bubble_ns},
          {"exposed_communication_ns", time.exposed_communication_ns},
          {"recompute_ns", time.recompute_ns},
          {"exposed_offload_ns", time.exposed_offload_ns},
          {"gradient_reduce_ns", time.gradient_reduce_ns},
          {"parameter_gather_ns", time.parameter_gather_ns},
          {"optimizer_ns", time.optimizer_ns},
          {"overhead_ns", time.overhead_ns}};
}

Json forecast_json(const OomForecast& forecast) {
  return {{"iterations", forecast.iterations},
          {"iterations_over", forecast.iterations_over},
          {"per_1000", forecast.per_1000},
          {"at_least_one_in_1000", forecast.at_least_one_in_1000},
          {"worst_iteration", forecast.worst_iteration},
          {"worst_pp_rank", forecast.worst_pp_rank},
          {"worst_peak_bytes", forecast.worst_peak_bytes}};
}

Json point_json(const SearchResult& search, const SearchPoint& point) {
  return {{"layout", layout_text(point.layout)},
          {"pipeline", pipeline_kind_name(point.pipeline)},
          {"micro_batch_size", point.micro_batch_size},
          {"microbatches", point.microbatches},
          {"recompute", search.recompute[point.recompute].name},
          {"iteration_ns", point.iteration_ns},
          {"tokens_per_s", point.tokens_per_s},
          {"mfu_fraction", point.mfu_fraction},
          {"peak_bytes", point.peak_bytes},
          {"survivable_factor", point.survivable_factor}};
}

Json search_json(const SearchResult& search) {
  const auto points = [&](const std::vector<SearchPoint>& from) {
    Json list = Json::array();
    for (const SearchPoint& point : from) list.push_back(point_json(search, point));
    return list;
  };
  Json answer = {{"configurations", search.configurations},
                 {"fitting", search.fitting},
                 {"best", points(search.best)},
                 {"pareto", points(search.pareto)}};
  if (search.fitting == 0 && search.configurations > 0) {
    answer["nearest"] = point_json(search, search.nearest);
    answer["short_by_bytes"] = search.short_by_bytes;
  }
  return answer;
}

Json job_json(const Job& job) {
  return {{"world_size", job.layout.world_size},
          {"layout", layout_text(job.layout)},
          {"pipeline", pipeline_kind_name(job.pipeline)},
          {"stages", stages_text(job.stages)},
          {"micro_batch_size", job.micro_batch_size},
          {"microbatches", job.microbatches},
          {"seq", job.seq}};
}

}  // namespace

Json to_json(const JobPlanRequest& request, const JobPlanReport& report) {
  Json ranks = Json::array();
  for (const JobRank& rank : report.ranks) {
    ranks.push_back({{"pp_rank", rank.pp_rank},
                     {"holds", rank.content},
                     {"static_bytes", rank.static_bytes},
                     {"calm", memory_json(rank.calm)},
                     {"loaded", memory_json(rank.loaded)},
                     {"worst_bytes", rank.worst_bytes},
                     {"survivable_factor", rank.survivable_factor}});
  }
  Json actions = Json::array();
  for (const JobAction& action : report.actions) {
    actions.push_back({{"name", action.name},
                       {"peak_change_bytes", action.peak_change_bytes},
                       {"time_change_ns", action.time_change_ns},
                       {"survivable_factor", action.survivable_factor}});
  }
  const ModelSpec& model = request.job.model;
  Json answer = {
      {"type", "job_plan"},
      {"version", kFormatVersion},
      {"bagualu", BAGUALU_VERSION},
      {"model", to_json(model)},
      {"parameters",
       {{"total", total_parameters(model)},
        {"active", active_parameters(model)},
        {"mtp", mtp_parameters(model)}}},
      {"job", job_json(request.job)},
      {"strategy", strategy_to_json(request.job)},
      {"system", request.system.name},
      {"imbalance", report.loads.factor},
      {"budget_bytes", request.budget_bytes > 0 ? Json(request.budget_bytes) : Json(nullptr)},
      {"worst_imbalance", report.worst_imbalance},
      {"floor_bytes", report.floor_bytes},
      {"short_by_bytes", report.short_by_bytes},
      {"heaviest_rank", report.ranks[report.heaviest].pp_rank},
      {"ranks", ranks},
      {"time", time_json(report.time)},
      {"calm_time", time_json(report.calm_time)},
      {"actions", actions},
      {"ignored", request.ignored},
      {"unmodelled", request.unmodelled}};
  if (report.forecast) {
    answer["forecast"] = forecast_json(*report.forecast);
    answer["forecast"]["left_out"] = request.trace_left_out;
  }
  if (report.cold_forecast) answer["cold_forecast"] = forecast_json(*report.cold_forecast);
  if (report.search) answer["search"] = search_json(*report.search);
  return answer;
}

void print_table(const JobPlanRequest& request, const JobPlanReport& report, std::ostream& out) {
  print_head(request, report, out);
  if (request.search_alone) {
    print_search(*report.search, out);
    return;
  }
  print_ranks(request, report, out);
  print_peak(request, report, out);
  print_time(report, out);
  print_actions(request, report, out);
  if (report.forecast || report.cold_forecast) out << '\n';
  if (report.forecast) {
    print_forecast(("routing of " + request.trace_name).c_str(), *report.forecast, out);
    if (request.trace_left_out > 0) {
      out << fmt::format("  {} records of the log could not be used; `bagualu trace` tells which\n",
                         request.trace_left_out);
    }
  }
  if (report.cold_forecast) print_forecast("cold router", *report.cold_forecast, out);
  if (report.search) print_search(*report.search, out);
}

void explain_tensor(const Job& job, const std::string& text, std::ostream& out) {
  const JobMemory memory(job);
  std::vector<std::string> known;
  bool found = false;
  int64_t shown_dense = -1;
  int64_t shown_moe = -1;
  for (int64_t layer = 0; layer < job.model.layers; ++layer) {
    // Layers of a kind are alike.
    int64_t& shown = job.model.is_moe(layer) ? shown_moe : shown_dense;
    if (shown >= 0) continue;
    shown = layer;
    for (const TensorRow& tensor : memory.tensors(layer)) {
      known.push_back(tensor.name);
      if (tensor.name.find(text) == std::string::npos) continue;
      found = true;
      out << fmt::format("{:<34}{:<12}= {}  ({}, made by {})\n", tensor.name,
                         format_bytes(tensor.bytes), tensor.formula,
                         tensor.saved ? "kept for backward" : "inside one pass", tensor.op);
    }
  }
  if (!found) {
    throw InvalidInput("bagualu plan", "--explain", text,
                       fmt::format("part of one of: {}", fmt::join(known, ", ")));
  }
}

}  // namespace bagualu
