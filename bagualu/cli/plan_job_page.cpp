#include "bagualu/cli/plan_job_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "bagualu/base/units.h"
#include "bagualu/cli/plan_page.h"
#include "bagualu/schedule/pipeline.h"
#include "bagualu/schedule/pipeline_text.h"

namespace bagualu {
namespace {

constexpr int64_t kDrawnMicrobatches = 64;  // above, a pass is thinner than a pixel
constexpr int kCurvePoints = 33;

/// Fills the page; keeps the order and its times, which all pictures share.
class JobPage {
 public:
  JobPage(const JobPlanRequest& request, const JobPlanReport& report)
      : request_(request),
        report_(report),
        job_(request.job),
        drawn_(shortened(request)),
        memory_(drawn_) {}

  std::string html() {
    head();
    simulate_order();
    for (const JobRank& rank : report_.ranks) add_rank(rank);
    curves();
    tables();
    return plan_page_html(page_);
  }

 private:
  /// A step of more micro-batches than are drawn repeats its steady part.
  static Job shortened(const JobPlanRequest& request) {
    Job job = request.job;
    int64_t least = std::max(kDrawnMicrobatches, 4 * job.layout.pp);
    for (const auto& [microbatch, factor] : request.loads.spikes) {
      least = std::max(least, microbatch + 4 * job.layout.pp);
    }
    // Interleaving works in groups of pp.
    least = (least + job.layout.pp - 1) / job.layout.pp * job.layout.pp;
    job.microbatches = std::min(job.microbatches, least);
    return job;
  }

  void head() {
    const JobRank& heaviest = report_.ranks[report_.heaviest];
    page_.title = fmt::format("{} on {} devices", job_.model.name, job_.layout.world_size);
    page_.over_budget = report_.short_by_bytes > 0;
    page_.summary =
        fmt::format("Heaviest is pipeline rank {}: {} at {} in {}{}", heaviest.pp_rank,
                    format_bytes(heaviest.loaded.peak_bytes), heaviest.loaded.cause.op,
                    pass_text(heaviest.loaded.cause.pass),
                    page_.over_budget ? fmt::format(", {} over the budget of {}.",
                                                    format_bytes(report_.short_by_bytes),
                                                    format_bytes(request_.budget_bytes))
                                      : std::string("."));
    page_.facts = {{"layout", layout_text(job_.layout)},
                   {"order", std::string(pipeline_kind_name(job_.pipeline))},
                   {"stages", stages_text(job_.stages)},
                   {"system", request_.system.name},
                   {"iteration, predicted", format_ns(report_.time.iteration_ns)},
                   {"MFU, predicted", fmt::format("{:.1f} %", 100 * report_.time.mfu_fraction)}};
    page_.budget_bytes = request_.budget_bytes;
    page_.asked_factor = request_.loads.factor;
    page_.kinds = {"static", "saved activations", "inside a pass"};
    if (!request_.unmodelled.empty()) {
      page_.notes.push_back(fmt::format("Not modelled, so not in these figures: {}.",
                                        fmt::join(request_.unmodelled, ", ")));
    }
    page_.notes.emplace_back("Every figure is predicted; nothing here was measured.");
  }

  void simulate_order() {
    const auto pp = static_cast<int>(job_.layout.pp);
    order_ = make_order(job_.pipeline, pp, static_cast<int>(job_.stages_per_rank()),
                        static_cast<int>(drawn_.microbatches));
    PipelineTimes times = equal_times(order_, 0, 0);
    for (size_t s = 0; s < times.forward_ns.size(); ++s) {
      const StageTime& stage = report_.time.stages[s];
      std::fill(times.forward_ns[s].begin(), times.forward_ns[s].end(), stage.forward_ns);
      std::fill(times.backward_ns[s].begin(), times.backward_ns[s].end(), stage.backward_ns);
      if (times.weight_grad_ns.empty()) continue;
      std::fill(times.weight_grad_ns[s].begin(), times.weight_grad_ns[s].end(),
                stage.weight_gradient_ns);
    }
    run_ = simulate(order_, times);
    in_seconds_ = run_.makespan_ns > 5'000'000'000;
    page_.time_unit = in_seconds_ ? "s" : "ms";
    if (job_.layout.pp > 1) page_.pipeline_svg = draw_order_svg(order_, run_);
  }

  void add_rank(const JobRank& rank) {
    const auto r = static_cast<size_t>(rank.pp_rank);
    const double unit_ns = in_seconds_ ? 1e9 : 1e6;
    PlanPageSeries series;
    series.name = fmt::format("rank {}: {}", rank.pp_rank, rank.content);
    const std::vector<JobMemoryPoint> points = memory_.over_time(rank.pp_rank, request_.loads);
    for (size_t i = 0; i < points.size(); ++i) {
      const int64_t saved = std::max<int64_t>(0, points[i].saved_bytes - rank.static_bytes);
      const int64_t inside = std::max<int64_t>(0, points[i].peak_bytes - rank.static_bytes - saved);
      series.points.push_back({pass_text(points[i].pass),
                               static_cast<double>(run_.start_ns[r][i]) / unit_ns,
                               static_cast<double>(run_.end_ns[r][i]) / unit_ns,
                               {rank.static_bytes, saved, inside}});
    }
    page_.over_time.push_back(std::move(series));

    PlanPageRank row;
    row.name = fmt::format("{}", rank.pp_rank);
    row.content = rank.content;
    row.static_bytes = rank.static_bytes;
    int64_t activations = 0;
    for (const KindBytes& kind : rank.loaded.by_kind) {
      if (kind.kind == "activations") activations = kind.bytes;
    }
    row.peak_kinds = {rank.static_bytes, activations,
                      rank.loaded.peak_bytes - rank.static_bytes - activations};
    row.calm_bytes = rank.calm.peak_bytes;
    row.peak_bytes = rank.loaded.peak_bytes;
    row.worst_bytes = rank.worst_bytes;
    row.survivable_factor = rank.survivable_factor;
    row.cause = fmt::format("{} in {}", rank.loaded.cause.op, pass_text(rank.loaded.cause.pass));
    page_.ranks.push_back(std::move(row));
  }

  /// From a rank without rows to the asked factor and what is survived beyond, at most the worst.
  void curves() {
    if (!job_.model.has_moe()) return;
    double last = std::max(2 * request_.loads.factor, 3.0);
    for (const JobRank& rank : report_.ranks) {
      last = std::max(last, 1.1 * std::min(rank.survivable_factor, 8.0));
    }
    last = std::min(last, report_.worst_imbalance);
    for (const JobRank& rank : report_.ranks) {
      PlanPageCurve curve;
      curve.name = fmt::format("rank {}", rank.pp_rank);
      for (int i = 0; i < kCurvePoints; ++i) {
        const double factor = last * i / (kCurvePoints - 1);
        curve.points.emplace_back(factor, memory_.peak_bytes(rank.pp_rank, {.factor = factor}));
      }
      page_.curves.push_back(std::move(curve));
    }
  }

  void tables() {
    PlanPageTable tensors;
    tensors.title = "Largest tensors alive at the heaviest rank's peak";
    tensors.head = {"tensor", "made by", "how many", "bytes of one", "together"};
    tensors.numeric = {false, false, true, false, true};
    for (const TensorRow& tensor : report_.ranks[report_.heaviest].loaded.largest) {
      tensors.rows.push_back({tensor.name, tensor.op, fmt::format("{}", tensor.count),
                              tensor.formula, format_bytes(tensor.bytes)});
    }
    page_.tables.push_back(std::move(tensors));
    if (report_.actions.empty()) return;
    PlanPageTable actions;
    actions.title = "One action more";
    actions.note = "Each valued by what it does to the heaviest rank's peak and to the iteration.";
    actions.head = {"action", "peak", "iteration", "then survives"};
    actions.numeric = {false, true, true, true};
    for (const JobAction& action : report_.actions) {
      actions.rows.push_back(
          {action.name, format_bytes(action.peak_change_bytes),
           (action.time_change_ns < 0 ? "-" : "") + format_ns(std::abs(action.time_change_ns)),
           request_.budget_bytes > 0 ? fmt::format("{:.2f}x", action.survivable_factor)
                                     : std::string("-")});
    }
    page_.tables.push_back(std::move(actions));
  }

  const JobPlanRequest& request_;
  const JobPlanReport& report_;
  const Job& job_;
  const Job drawn_;
  const JobMemory memory_;
  PipelineOrder order_;
  PipelineRun run_;
  bool in_seconds_ = false;
  PlanPage page_;
};

}  // namespace

std::string job_page(const JobPlanRequest& request, const JobPlanReport& report) {
  return JobPage(request, report).html();
}

}  // namespace bagualu
