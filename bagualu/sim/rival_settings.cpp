// What the authors of each rival would choose for a job: docs/evaluation.md, Settings of the
// rivals.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "bagualu/base/error.h"
#include "bagualu/provision/job_survival.h"
#include "bagualu/schedule/job_memory.h"
#include "bagualu/schedule/job_time.h"
#include "bagualu/sim/scenario.h"

namespace bagualu {
namespace {

constexpr double kThresholdStep = 0.05;

/// The job with another residency, all else equal.
Job with_recompute(const Job& job, std::vector<std::string> modules) {
  Job changed = job;
  changed.offload = {};
  changed.recompute = {};
  if (!modules.empty()) {
    changed.recompute.granularity = RecomputeGranularity::kSelective;
    changed.recompute.modules = std::move(modules);
  }
  return changed;
}

RoutedLoads fit_loads(const Job& job) {
  return possible_loads({.factor = kRivalFitImbalance}, job);
}

int64_t peak_bytes(const Job& job, const RoutedLoads& loads) {
  const JobMemory memory(job);
  int64_t peak = 0;
  for (int64_t rank = 0; rank < job.layout.pp; ++rank) {
    peak = std::max(peak, memory.peak_bytes(rank, loads));
  }
  return peak;
}

/// Largest load at which everything can be saved on every rank.
double save_all_factor(const Job& job, int64_t budget_bytes) {
  const Job saved = with_recompute(job, {});
  const JobMemory memory(saved);
  double factor = std::numeric_limits<double>::infinity();
  for (int64_t rank = 0; rank < job.layout.pp; ++rank) {
    factor = std::min(factor, largest_survivable_factor(saved, memory, rank, budget_bytes));
  }
  return factor;
}

/// Every set of modules: the fastest that fits, else the smallest.
std::vector<std::string> best_modules(const Job& job, const SystemSpec& system,
                                      int64_t budget_bytes) {
  const std::vector<std::string> modules = recompute_modules_of(job.model);
  const RoutedLoads loads = fit_loads(job);
  std::vector<std::string> best;
  int64_t best_ns = std::numeric_limits<int64_t>::max();
  int64_t best_over = std::numeric_limits<int64_t>::max();
  for (size_t set = 0; set < size_t{1} << modules.size(); ++set) {
    std::vector<std::string> chosen;
    for (size_t i = 0; i < modules.size(); ++i) {
      if ((set >> i & 1) != 0) chosen.push_back(modules[i]);
    }
    const Job candidate = with_recompute(job, chosen);
    if (job_fault(candidate)) continue;
    const int64_t over = std::max<int64_t>(0, peak_bytes(candidate, loads) - budget_bytes);
    if (over > best_over) continue;
    const int64_t ns = job_time(candidate, system, loads).iteration_ns;
    if (over == best_over && ns >= best_ns) continue;
    best = chosen;
    best_ns = ns;
    best_over = over;
  }
  return best;
}

}  // namespace

const std::vector<std::string>& rival_names() {
  static const std::vector<std::string> kNames = {"static", "selective", "threshold",
                                                  "retry",  "kwai",      "adapipe"};
  return kNames;
}

SimPolicy published_settings(const std::string& policy, const Job& job, const SystemSpec& system,
                             int64_t budget_bytes) {
  const std::vector<std::string>& names = policy_names();
  if (std::find(names.begin(), names.end(), policy) == names.end()) {
    throw InvalidInput("published_settings", "policy", policy,
                       fmt::format("{}", fmt::join(names, ", ")));
  }
  const int64_t budget = budget_bytes > 0 ? budget_bytes : system.device_memory_bytes;
  SimPolicy made;
  made.label = made.policy = policy;
  made.overlap = policy == "adaptive";
  PolicyOptions& options = made.options;
  // Their plans are fitted stage by stage when the policy is made (provision/policy_*.cpp).
  options.static_fit_imbalance = kRivalFitImbalance;
  options.adapipe_fit_imbalance = kRivalFitImbalance;
  options.kwai_fit_imbalance = kRivalFitImbalance;
  if (budget == 0) {
    if (policy == "selective") made.policy = "save-all";
    return made;
  }
  if (policy == "selective") {
    options.recompute_modules = best_modules(job, system, budget);
    // Where everything fits, its users recompute nothing.
    if (options.recompute_modules.empty()) made.policy = "save-all";
  }
  if (policy == "threshold" || policy == "retry") {
    const double factor =
        std::floor(save_all_factor(job, budget) / kThresholdStep) * kThresholdStep;
    options.threshold = options.retry_factor = std::max(1.0, factor);
  }
  return made;
}

}  // namespace bagualu
