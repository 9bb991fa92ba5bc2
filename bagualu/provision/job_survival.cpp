#include "bagualu/provision/job_survival.h"

#include <algorithm>
#include <cmath>
#include <string_view>

namespace bagualu {
namespace {

constexpr double kStep = 1024;  // factors are looked for in steps of 1 / kStep

bool contains(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// A module is recomputed or offloaded, not both; recomputing a whole MoE layer drops what its
/// experts' modules would have offloaded.
bool excluded(const Job& job, const std::string& module, bool recompute) {
  if (recompute) {
    if (contains(job.offload.modules, module)) return true;
    return module == "moe" && (contains(job.offload.modules, "expert_fc1") ||
                               contains(job.offload.modules, "moe_act"));
  }
  return contains(job.recompute.modules, module) ||
         (contains(job.recompute.modules, "moe") &&
          (module == "expert_fc1" || module == "moe_act"));
}

}  // namespace

double worst_imbalance(const Job& job) {
  if (!job.model.has_moe()) return 1;
  const int64_t local = job.model.experts / job.layout.ep;
  const double reach = static_cast<double>(job.layout.ep * std::min(job.model.top_k, local)) /
                       static_cast<double>(job.model.top_k);
  return job.moe.capacity_factor > 0 ? std::min(job.moe.capacity_factor, reach) : reach;
}

RoutedLoads possible_loads(RoutedLoads loads, const Job& job) {
  const double worst = worst_imbalance(job);
  loads.factor = std::min(loads.factor, worst);
  for (auto& [microbatch, factor] : loads.spikes) factor = std::min(factor, worst);
  return loads;
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

std::vector<std::pair<std::string, Job>> job_actions(const Job& job) {
  std::vector<std::pair<std::string, Job>> actions;
  if (job.recompute.granularity == RecomputeGranularity::kFull) return actions;
  for (const std::string& module : recompute_modules_of(job.model)) {
    if (module == "mlp_act") continue;  // Kwai's
    if (contains(job.recompute.modules, module) || excluded(job, module, true)) continue;
    actions.emplace_back("recompute " + module, job);
    RecomputeSettings& settings = actions.back().second.recompute;
    settings.granularity = RecomputeGranularity::kSelective;
    settings.modules.push_back(module);
    std::sort(settings.modules.begin(), settings.modules.end());
  }
  for (const std::string& module : offload_modules_of(job.model)) {
    // Megatron moves attn_proj's input with core_attn only; "all" is Kwai's.
    if (module == "attn_proj" || module == "all") continue;
    if (contains(job.offload.modules, module) || excluded(job, module, false)) continue;
    actions.emplace_back("offload " + module, job);
    actions.back().second.offload.modules.push_back(module);
  }
  actions.emplace_back("recompute every layer", job);
  Job& full = actions.back().second;
  full.recompute = {};
  full.recompute.granularity = RecomputeGranularity::kFull;
  full.offload = {};
  return actions;
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
