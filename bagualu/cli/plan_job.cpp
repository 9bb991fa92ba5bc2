#include "bagualu/cli/plan_job.h"

#include <algorithm>
#include <utility>

#include "bagualu/model/routing_loads.h"

namespace bagualu {
namespace {

/// Answers one request; keeps what the answers share.
class JobPlanner {
 public:
  explicit JobPlanner(const JobPlanRequest& request)
      : request_(request), job_(request.job), memory_(request.job) {}

  JobPlanReport answer() {
    report_.worst_imbalance = worst_imbalance(job_);
    report_.loads = possible_loads(request_.loads, job_);
    for (int64_t rank = 0; rank < job_.layout.pp; ++rank) add_rank(rank);
    const JobRank& heaviest = report_.ranks[report_.heaviest];
    if (request_.budget_bytes > 0) {
      report_.short_by_bytes =
          std::max<int64_t>(0, heaviest.loaded.peak_bytes - request_.budget_bytes);
    }
    report_.time = job_time(job_, request_.system, report_.loads);
    report_.calm_time = job_time(job_, request_.system, {});
    report_.floor_bytes = floor();
    value_actions();
    forecast();
    if (request_.search) {
      report_.search =
          search_jobs(job_, request_.system, {}, request_.loads, request_.budget_bytes);
    }
    return std::move(report_);
  }

 private:
  void add_rank(int64_t rank) {
    JobRank row;
    row.pp_rank = rank;
    for (const int64_t stage : job_.stages_of_rank(rank)) {
      row.content +=
          (row.content.empty() ? "" : " ") + stages_text({job_.stages[static_cast<size_t>(stage)]});
    }
    row.static_bytes = memory_.static_bytes(rank);
    row.calm = memory_.describe(rank, {});
    row.loaded = memory_.describe(rank, report_.loads);
    row.worst_bytes = memory_.peak_bytes(rank, {.factor = report_.worst_imbalance});
    if (request_.budget_bytes > 0) {
      row.survivable_factor = largest_survivable_factor(job_, memory_, rank, request_.budget_bytes);
    }
    report_.ranks.push_back(std::move(row));
    const auto peak = [&](size_t r) { return report_.ranks[r].loaded.peak_bytes; };
    if (peak(report_.ranks.size() - 1) > peak(report_.heaviest)) {
      report_.heaviest = report_.ranks.size() - 1;
    }
  }

  int64_t floor() const {
    Job full = job_;
    full.recompute = {};
    full.recompute.granularity = RecomputeGranularity::kFull;
    full.offload = {};
    const JobMemory memory(full);
    int64_t bytes = 0;
    for (int64_t rank = 0; rank < job_.layout.pp; ++rank) {
      bytes = std::max(bytes, memory.peak_bytes(rank, {.factor = report_.worst_imbalance}));
    }
    return bytes;
  }

  void value_actions() {
    for (auto& [name, job] : job_actions(job_)) {
      const JobMemory memory(job);
      JobAction action;
      action.name = std::move(name);
      int64_t peak = 0;
      action.survivable_factor = report_.worst_imbalance;
      for (int64_t rank = 0; rank < job.layout.pp; ++rank) {
        peak = std::max(peak, memory.peak_bytes(rank, report_.loads));
        if (request_.budget_bytes == 0) continue;
        action.survivable_factor =
            std::min(action.survivable_factor,
                     largest_survivable_factor(job, memory, rank, request_.budget_bytes));
      }
      action.peak_change_bytes = peak - report_.ranks[report_.heaviest].loaded.peak_bytes;
      action.time_change_ns =
          job_time(job, request_.system, report_.loads).iteration_ns - report_.time.iteration_ns;
      report_.actions.push_back(std::move(action));
    }
    // What lowers the peak first, by what a byte costs; what does not is worth nothing, and last.
    std::stable_sort(
        report_.actions.begin(), report_.actions.end(), [](const JobAction& a, const JobAction& b) {
          const bool a_helps = a.peak_change_bytes < 0;
          const bool b_helps = b.peak_change_bytes < 0;
          if (a_helps != b_helps) return a_helps;
          return static_cast<double>(a.time_change_ns) * static_cast<double>(-b.peak_change_bytes) <
                 static_cast<double>(b.time_change_ns) * static_cast<double>(-a.peak_change_bytes);
        });
  }

  void forecast() {
    if (request_.budget_bytes == 0) return;
    if (!request_.trace.empty()) {
      report_.forecast = oom_forecast(job_, memory_, request_.budget_bytes, request_.trace);
    }
    if (request_.cold_iterations > 0) {
      std::vector<RoutedLoads> cold;
      for (int64_t i = 0; i < request_.cold_iterations; ++i) {
        cold.push_back(cold_router(i, {}, report_.worst_imbalance));
      }
      report_.cold_forecast = oom_forecast(job_, memory_, request_.budget_bytes, cold);
    }
  }

  const JobPlanRequest& request_;
  const Job& job_;
  const JobMemory memory_;
  JobPlanReport report_;
};

}  // namespace

JobPlanReport make_job_report(const JobPlanRequest& request) {
  return JobPlanner(request).answer();
}

}  // namespace bagualu
