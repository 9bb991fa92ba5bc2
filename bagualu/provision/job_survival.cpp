#include "bagualu/provision/job_survival.h"

#include <algorithm>
#include <cmath>

namespace bagualu {
namespace {

constexpr double kStep = 1024;  // factors are looked for in steps of 1 / kStep

}  // namespace

double worst_imbalance(const Job& job) {
  if (!job.model.has_moe()) return 1;
  const int64_t local = job.model.experts / job.layout.ep;
  const double reach = static_cast<double>(job.layout.ep * std::min(job.model.top_k, local)) /
                       static_cast<double>(job.model.top_k);
  return job.moe.capacity_factor > 0 ? std::min(job.moe.capacity_factor, reach) : reach;
}

double largest_survivable_factor(const Job& job, const JobMemory& memory, int64_t pp_rank,
                                 int64_t budget_bytes) {
  const double worst = worst_imbalance(job);
  const auto fits = [&](double factor) {
    return memory.peak_bytes(pp_rank, {.factor = factor}) <= budget_bytes;
  };
  if (fits(worst)) return worst;
  if (!fits(0)) return 0;
  // The peak never falls when rows grow.
  int64_t low = 0;
  int64_t high = static_cast<int64_t>(std::ceil(worst * kStep));
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (fits(static_cast<double>(middle) / kStep) ? low : high) = middle;
  }
  return static_cast<double>(low) / kStep;
}

OomForecast oom_forecast(const Job& job, const JobMemory& memory, int64_t budget_bytes,
                         const std::vector<RoutedLoads>& iterations) {
  OomForecast forecast;
  forecast.iterations = static_cast<int64_t>(iterations.size());
  for (size_t i = 0; i < iterations.size(); ++i) {
    bool over = false;
    for (int64_t rank = 0; rank < job.layout.pp; ++rank) {
      const int64_t peak = memory.peak_bytes(rank, iterations[i]);
      over = over || peak > budget_bytes;
      if (peak <= forecast.worst_peak_bytes) continue;
      forecast.worst_peak_bytes = peak;
      forecast.worst_iteration = static_cast<int64_t>(i);
      forecast.worst_pp_rank = rank;
    }
    forecast.iterations_over += over ? 1 : 0;
  }
  if (iterations.empty()) return forecast;
  const double share =
      static_cast<double>(forecast.iterations_over) / static_cast<double>(forecast.iterations);
  forecast.per_1000 = 1000 * share;
  forecast.at_least_one_in_1000 = 1 - std::pow(1 - share, 1000);
  return forecast;
}

}  // namespace bagualu
