#include "bagualu/cli/plan_job_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "bagualu/base/units.h"
#include "bagualu/schedule/job_memory.h"
#include "bagualu/schedule/pipeline.h"
#include "bagualu/schedule/pipeline_text.h"

namespace bagualu {
namespace {

enum Kind : uint8_t { kParameters, kGradients, kState, kActivations, kTransients, kKinds };
constexpr std::array<const char*, kKinds> kKindNames = {
    "parameters", "gradients", "optimizer and other state", "activations", "transients"};
constexpr int kCurvePoints = 33;
constexpr size_t kShownTensors = 10;
constexpr int64_t kLongNs = 5'000'000'000;  // shown in seconds
constexpr int64_t kDrawnPerRank = 4;        // micro-batches per pipeline rank in the drawing

std::vector<int64_t> bytes_by_kind(const RankMemory& memory) {
  std::vector<int64_t> bytes(kKinds);
  for (const KindBytes& entry : memory.by_kind) {
    const std::string name = entry.kind.substr(0, entry.kind.find('.'));
    const Kind kind = name == "parameters"    ? kParameters
                      : name == "gradients"   ? kGradients
                      : name == "activations" ? kActivations
                      : name == "transients"  ? kTransients
                                              : kState;
    bytes[kind] += entry.bytes;
  }
  return bytes;
}

std::string signed_bytes(int64_t bytes) { return (bytes > 0 ? "+" : "") + format_bytes(bytes); }

std::string cause_text(const RankMemory& memory) {
  return fmt::format("{} in {}, {} micro-batches in flight", memory.cause.op,
                     pass_text(memory.cause.pass), memory.in_flight);
}

/// An order with the times of its passes.
struct TimedOrder {
  PipelineOrder order;
  PipelineRun run;
};

TimedOrder timed_order(const Job& job, const JobTime& time, int64_t microbatches) {
  TimedOrder timed;
  timed.order = make_order(job.pipeline, static_cast<int>(job.layout.pp),
                           static_cast<int>(job.stages_per_rank()), static_cast<int>(microbatches));
  PipelineTimes times;
  for (int s = 0; s < timed.order.stages; ++s) {
    // DualPipe's order has one stage a rank where the job has two halves of the model.
    const StageTime& stage = time.stages[static_cast<size_t>(s) % time.stages.size()];
    const auto row = [&](int64_t ns) {
      return std::vector<int64_t>(static_cast<size_t>(microbatches), std::max<int64_t>(1, ns));
    };
    times.forward_ns.push_back(row(stage.forward_ns));
    times.backward_ns.push_back(row(std::max<int64_t>(2, stage.backward_ns)));
    times.weight_grad_ns.push_back(row(std::min(stage.weight_gradient_ns, stage.backward_ns - 1)));
  }
  timed.run = simulate(timed.order, times);
  return timed;
}

class JobPage {
 public:
  JobPage(const JobPlanRequest& request, const JobPlanReport& report)
      : request_(request), report_(report), job_(request.job), memory_(request.job) {}

  PlanPage make() {
    head();
    for (const JobRank& rank : report_.ranks) add_rank(rank);
    add_pictures();
    add_curves();
    add_tensors();
    add_actions();
    add_notes();
    return std::move(page_);
  }

 private:
  void head() {
    const JobRank& heaviest = report_.ranks[report_.heaviest];
    page_.title = fmt::format("{} on {} devices", job_.model.name, job_.layout.world_size);
    page_.budget_bytes = request_.budget_bytes;
    page_.over_budget = report_.short_by_bytes > 0;
    const std::string peak = format_bytes(heaviest.loaded.peak_bytes);
    page_.summary = page_.over_budget
                        ? fmt::format("Rank {} needs {}: {} more than the budget.",
                                      heaviest.pp_rank, peak, format_bytes(report_.short_by_bytes))
                        : fmt::format("Heaviest is rank {} with {}, in {}.", heaviest.pp_rank, peak,
                                      cause_text(heaviest.loaded));
    page_.kinds.assign(kKindNames.begin(), kKindNames.end());
    const bool one_factor = report_.loads.by_layer.empty() && report_.loads.spikes.empty();
    page_.asked_factor = one_factor ? report_.loads.factor : 0;
    const auto fact = [&](const char* name, std::string value) {
      page_.facts.emplace_back(name, std::move(value));
    };
    fact("layout", layout_text(job_.layout));
    fact("order", std::string(pipeline_kind_name(job_.pipeline)));
    fact("micro-batch", fmt::format("{} x {} tokens", job_.micro_batch_size, job_.seq));
    fact("micro-batches per step", std::to_string(job_.microbatches));
    fact("asked load", one_factor ? fmt::format("{:.2f}x", report_.loads.factor) : "as given");
    fact("largest imbalance there can be", fmt::format("{:.2f}x", report_.worst_imbalance));
    if (request_.budget_bytes > 0) fact("budget", format_bytes(request_.budget_bytes));
    fact("system", request_.system.name);
    fact("iteration, predicted", format_ns(report_.time.iteration_ns));
    fact("MFU, predicted", fmt::format("{:.1f} %", 100 * report_.time.mfu_fraction));
    add_forecast("under the trace", report_.forecast);
    add_forecast("cold router", report_.cold_forecast);
  }

  void add_forecast(const char* name, const std::optional<OomForecast>& forecast) {
    if (!forecast) return;
    page_.facts.emplace_back(fmt::format("{}: over the budget", name),
                             fmt::format("{:.3g} of 1,000 iterations", forecast->per_1000));
  }

  void add_rank(const JobRank& rank) {
    page_.ranks.push_back({std::to_string(rank.pp_rank), rank.content, bytes_by_kind(rank.loaded),
                           rank.static_bytes, rank.calm.peak_bytes, rank.loaded.peak_bytes,
                           rank.worst_bytes, rank.survivable_factor, cause_text(rank.loaded)});
  }

  void add_pictures() {
    const TimedOrder timed = timed_order(job_, report_.time, job_.microbatches);
    page_.time_unit = timed.run.makespan_ns >= kLongNs ? "s" : "ms";
    for (const JobRank& rank : report_.ranks) add_series(rank, timed);
    const int64_t drawn = std::min(job_.microbatches, kDrawnPerRank * job_.layout.pp);
    if (drawn == job_.microbatches) {
      page_.pipeline_svg = draw_order_svg(timed.order, timed.run);
    } else {
      const TimedOrder part = timed_order(job_, report_.time, drawn);
      page_.pipeline_svg = draw_order_svg(part.order, part.run);
      page_.notes.push_back(fmt::format("The pipeline is drawn with {} of {} micro-batches.", drawn,
                                        job_.microbatches));
    }
  }

  void add_series(const JobRank& rank, const TimedOrder& timed) {
    const auto r = static_cast<size_t>(rank.pp_rank);
    const std::vector<JobMemoryPoint> points = memory_.over_time(rank.pp_rank, report_.loads);
    const bool has_times = points.size() == timed.order.ranks[r].size();
    if (!has_times) page_.time_unit = "passes";
    const double unit_ns = timed.run.makespan_ns >= kLongNs ? 1e9 : 1e6;
    const std::vector<int64_t> kinds = bytes_by_kind(rank.loaded);
    PlanPageSeries series;
    series.name = fmt::format("rank {}: {}", rank.pp_rank, rank.content);
    for (size_t i = 0; i < points.size(); ++i) {
      const JobMemoryPoint& point = points[i];
      PlanPagePoint drawn;
      drawn.label = pass_text(point.pass);
      const bool timed_axis = has_times && page_.time_unit != "passes";
      drawn.begin = timed_axis ? static_cast<double>(timed.run.start_ns[r][i]) / unit_ns
                               : static_cast<double>(i);
      drawn.end = timed_axis ? static_cast<double>(timed.run.end_ns[r][i]) / unit_ns
                             : static_cast<double>(i + 1);
      const int64_t saved = std::max<int64_t>(0, point.saved_bytes - rank.static_bytes);
      drawn.bytes = kinds;
      drawn.bytes[kActivations] = saved;
      drawn.bytes[kTransients] = std::max<int64_t>(0, point.peak_bytes - rank.static_bytes - saved);
      series.points.push_back(std::move(drawn));
    }
    page_.over_time.push_back(std::move(series));
  }

  /// Up to what is of interest: a quarter past what is survived, the asked load, at least 4.
  void add_curves() {
    double highest = std::max(4.0, 1.25 * page_.asked_factor);
    for (const JobRank& rank : report_.ranks) {
      highest = std::max(highest, 1.25 * rank.survivable_factor);
    }
    highest = std::min(highest, report_.worst_imbalance);
    if (!job_.model.has_moe() || highest <= 1) return;
    for (const JobRank& rank : report_.ranks) {
      PlanPageCurve curve;
      curve.name = fmt::format("rank {}", rank.pp_rank);
      for (int i = 0; i < kCurvePoints; ++i) {
        const double factor = 1 + (highest - 1) * i / (kCurvePoints - 1);
        curve.points.emplace_back(factor, memory_.peak_bytes(rank.pp_rank, {.factor = factor}));
      }
      page_.curves.push_back(std::move(curve));
    }
  }

  void add_tensors() {
    const JobRank& rank = report_.ranks[report_.heaviest];
    PageTable table;
    table.title = fmt::format("Largest tensors at the peak of rank {}", rank.pp_rank);
    table.note = cause_text(rank.loaded);
    table.head = {"tensor", "made by", "bytes", "alive", "one of them"};
    table.numeric = {false, false, true, true, false};
    for (size_t i = 0; i < std::min(kShownTensors, rank.loaded.largest.size()); ++i) {
      const TensorRow& tensor = rank.loaded.largest[i];
      table.rows.push_back({tensor.name, tensor.op, format_bytes(tensor.bytes),
                            std::to_string(tensor.count), tensor.formula});
    }
    if (!table.rows.empty()) page_.tables.push_back(std::move(table));
  }

  void add_actions() {
    PageTable table;
    table.title = "What one more action would do";
    table.note = "To the heaviest rank's peak at the asked load, and to the iteration.";
    table.head = {"action", "peak", "iteration", "survives"};
    table.numeric = {false, true, true, true};
    for (const JobAction& action : report_.actions) {
      table.rows.push_back(
          {action.name, signed_bytes(action.peak_change_bytes),
           (action.time_change_ns > 0 ? "+" : "") + format_ns(action.time_change_ns),
           request_.budget_bytes > 0 ? fmt::format("{:.2f}x", action.survivable_factor)
                                     : std::string("-")});
    }
    if (!table.rows.empty()) page_.tables.push_back(std::move(table));
  }

  void add_notes() {
    const auto list = [&](const char* what, const std::vector<std::string>& names) {
      if (!names.empty())
        page_.notes.push_back(fmt::format("{}: {}.", what, fmt::join(names, ", ")));
    };
    list("Not modelled, so not in these figures", request_.unmodelled);
    list("Ignored, no effect on memory or time", request_.ignored);
    page_.notes.push_back(fmt::format("Times are predicted, with the rates of {} ({}).",
                                      request_.system.name, request_.system.provenance));
  }

  const JobPlanRequest& request_;
  const JobPlanReport& report_;
  const Job& job_;
  const JobMemory memory_;
  PlanPage page_;
};

}  // namespace

PlanPage make_job_page(const JobPlanRequest& request, const JobPlanReport& report) {
  return JobPage(request, report).make();
}

std::string job_page(const JobPlanRequest& request, const JobPlanReport& report) {
  return plan_page_html(make_job_page(request, report));
}

}  // namespace bagualu
