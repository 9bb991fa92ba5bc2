#include "bagualu/provision/stage_plan.h"

#include <algorithm>
#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr int kMaxSpares = 3;

}  // namespace

StagePlanner::StagePlanner(const Graph& graph, const CostTable& cost, bool allow_quantise)
    : graph_(graph), frontier_(graph, cost, allow_quantise) {
  for (const FrontierComponent& component : frontier_.components()) {
    first_value_.push_back(values_);
    values_ += static_cast<int>(component.options.size());
  }
}

// Only components whose layer has another load than last time are looked at again.
void StagePlanner::load_slot(const StageMicrobatch& microbatch, Slot& slot) {
  const std::vector<LayerLoad>& loads = *microbatch.loads;
  BGL_CHECK(loads.size() == static_cast<size_t>(graph_.layers), loads.size(), graph_.layers);
  const bool first = slot.values.empty();
  if (!first && slot.loads == loads) return;
  slot.values.resize(static_cast<size_t>(values_));
  const auto& components = frontier_.components();
  for (size_t c = 0; c < components.size(); ++c) {
    const FrontierComponent& component = components[c];
    const LayerLoad& load = graph_.load_of(component.layer, loads);
    if (!first && (!component.scales || component.layer < 0 ||
                   slot.loads[static_cast<size_t>(component.layer)] == load)) {
      continue;
    }
    for (size_t o = 0; o < component.options.size(); ++o) {
      slot.values[static_cast<size_t>(first_value_[c]) + o] =
          frontier_.value(component, component.options[o], load);
    }
  }
  slot.pinned_bytes = 0;
  for (int u : frontier_.pinned()) {
    slot.pinned_bytes += graph_.unit_bytes(u, graph_.load_of(graph_.units[u].layer, loads));
  }
  slot.loads = loads;
}

// With a host limit the windows are cut so that all of them together stay within it.
void StagePlanner::build_pool(const StageProblem& problem, bool cap_windows) {
  pool_.clear();
  pool_.link_ns_per_byte = problem.link_ns_per_byte;
  pinned_sum_ = 0;
  int64_t host_left = problem.host_budget_bytes > 0 ? problem.host_budget_bytes : INT64_MAX / 8;
  windows_.clear();
  for (size_t m = 0; m < problem.microbatches.size(); ++m) {
    const Slot& slot = slots_[m];
    pinned_sum_ += slot.pinned_bytes;
    int64_t retained = 0;
    for (size_t c = 0; c < first_value_.size(); ++c) {
      const int first = static_cast<int>(pool_.options.size());
      const size_t options = frontier_.components()[c].options.size();
      for (size_t o = 0; o < options; ++o) {
        const OptionValue& value = slot.values[static_cast<size_t>(first_value_[c]) + o];
        pool_.options.push_back({value.retained_bytes, value.compute_ns, value.fixed_bytes});
      }
      retained += slot.values[static_cast<size_t>(first_value_[c])].retained_bytes;
      pool_.groups.push_back({first, first + static_cast<int>(options), static_cast<int>(m)});
    }
    int64_t window = std::min(problem.microbatches[m].free_link_bytes, retained);
    if (cap_windows) {
      window = std::min(window, host_left);
      host_left -= window;
    }
    windows_.push_back(window);
    pool_.microbatches.push_back({window, problem.microbatches[m].bubble_ns});
  }
  pool_.overflow_limit_bytes = problem.link_ns_per_byte > 0 ? host_left : 0;
  pool_.budget_bytes = problem.budget_bytes - pinned_sum_;
}

void StagePlanner::plan(const StageProblem& problem, StagePlan& result) {
  if (slots_.size() < problem.microbatches.size()) slots_.resize(problem.microbatches.size());
  for (size_t m = 0; m < problem.microbatches.size(); ++m) {
    load_slot(problem.microbatches[m], slots_[m]);
  }
  build_pool(problem, /*cap_windows=*/true);
  solve_and_pack(problem, 0, tolerance_, result);
  result.bound_ns = solution_.bound_ns;
  ns_per_byte_ = solution_.ns_per_byte;
  if (problem.host_budget_bytes > 0 && result.bound_ns > 0) {
    // Cutting the windows was our choice, so the bound has to hold without it.
    build_pool(problem, /*cap_windows=*/false);
    relaxation_.solve(pool_);
    result.bound_ns = std::min(result.bound_ns, relaxation_.bound_ns());
    build_pool(problem, /*cap_windows=*/true);
  }
  if (good_enough(result)) return;
  avoid_codes_in_windows(problem, result);
  fill_windows(problem, result);
  if (good_enough(result)) return;
  force_largest(problem, result);
  search_choices(problem, result);
  if (good_enough(result)) return;
  if (!result.feasible && !take_least(problem, result)) return;
  search_tensors(problem, result);
}

bool StagePlanner::good_enough(const StagePlan& result) const {
  return result.feasible &&
         result.exposed_ns - result.bound_ns <= tolerance_.gap_ns(result.exposed_ns);
}

// The relaxation takes encoded copies for bytes that a window carries off, and so it uses them
// where a window is free. Tried without them there.
void StagePlanner::avoid_codes_in_windows(const StageProblem& problem, StagePlan& result) {
  const bool has_codes =
      std::any_of(pool_.options.begin(), pool_.options.end(),
                  [](const PoolOption& option) { return option.fixed_bytes > 0; });
  const bool has_windows =
      std::any_of(windows_.begin(), windows_.end(), [](int64_t window) { return window > 0; });
  if (!has_codes || !has_windows) return;
  for (const PoolGroup& group : pool_.groups) {
    if (windows_[static_cast<size_t>(group.microbatch)] == 0) continue;
    const PoolOption& first = pool_.options[static_cast<size_t>(group.first_option)];
    for (int o = group.first_option; o < group.end_option; ++o) {
      PoolOption& option = pool_.options[static_cast<size_t>(o)];
      // As good as keeping everything, and dearer: never taken.
      if (option.fixed_bytes > 0) option = {first.bytes, INT64_MAX / 1024, 0};
    }
  }
  attempt_.bound_ns = result.bound_ns;
  solve_and_pack(problem, 0, tolerance_, attempt_);
  build_pool(problem, /*cap_windows=*/true);
  if (attempt_.feasible && (!result.feasible || attempt_.exposed_ns < result.exposed_ns)) {
    std::swap(result, attempt_);
  }
}

// Whole tensors may not fill the windows: is more recompute cheaper than more link?
void StagePlanner::fill_windows(const StageProblem& problem, StagePlan& result) {
  attempt_.bound_ns = result.bound_ns;
  for (int attempt = 0; attempt < kMaxSpares && solution_.feasible; ++attempt) {
    const int64_t spare = unfilled_bytes(problem, result);
    if (spare <= 0) return;
    solve_and_pack(problem, spare, without_closing(tolerance_), attempt_);
    if (!solution_.feasible) return;
    const bool better =
        attempt_.feasible && (!result.feasible || attempt_.exposed_ns < result.exposed_ns);
    const bool lost = !attempt_.feasible && !result.feasible;
    if (better || lost) std::swap(result, attempt_);
    if (!lost) return;
  }
}

// Bytes by which whole tensors miss what the pool counted on, if that matters.
int64_t StagePlanner::unfilled_bytes(const StageProblem& problem, const StagePlan& result) const {
  if (result.feasible) {
    const int64_t lost = result.exposed_ns - solution_.cost_ns;
    if (problem.link_ns_per_byte <= 0 || lost <= tolerance_.gap_ns(result.exposed_ns)) return 0;
    return static_cast<int64_t>(static_cast<double>(lost) / problem.link_ns_per_byte) + 1;
  }
  int64_t past = pool_.budget_bytes > 0 ? 1 : 0;
  for (size_t m = 0; m < result.offloaded_bytes.size(); ++m) {
    past += std::max<int64_t>(0, result.offloaded_bytes[m] - windows_[m]);
  }
  return past + last_spare_;
}

void StagePlanner::solve_and_pack(const StageProblem& problem, int64_t spare_bytes,
                                  const PoolTolerance& tolerance, StagePlan& result) {
  const int64_t budget = pool_.budget_bytes;
  pool_.budget_bytes -= spare_bytes;
  last_spare_ = spare_bytes;
  solver_.solve(pool_, tolerance, solution_);
  pool_.budget_bytes = budget;
  carry_out(problem, result);
}

// The pool's choice with whole tensors.
void StagePlanner::carry_out(const StageProblem& problem, StagePlan& result) {
  result.feasible = solution_.feasible;
  result.missing_bytes = solution_.missing_bytes;
  result.closed = solution_.closed;
  result.plans.resize(problem.microbatches.size());
  const auto& components = frontier_.components();
  for (size_t m = 0; m < result.plans.size(); ++m) {
    Plan& plan = result.plans[m];
    plan.residency.assign(graph_.units.size(), kSave);
    for (size_t c = 0; c < components.size(); ++c) {
      const size_t group = m * components.size() + c;
      const int option = solution_.choice[group] - pool_.groups[group].first_option;
      const FrontierOption& chosen = components[c].options[static_cast<size_t>(option)];
      for (size_t i = 0; i < chosen.choice.size(); ++i) {
        plan.residency[static_cast<size_t>(components[c].units[i])] = chosen.choice[i];
      }
    }
  }
  result.feasible = result.feasible && pack(problem, result);
  price(problem, result);
}

bool StagePlanner::pack(const StageProblem& problem, StagePlan& result) {
  items_.clear();
  for (size_t m = 0; m < result.plans.size(); ++m) {
    for (size_t u = 0; u < graph_.units.size(); ++u) {
      if (graph_.units[u].pinned || result.plans[m].residency[u] != kSave) continue;
      const LayerLoad& load = graph_.load_of(graph_.units[u].layer, *problem.microbatches[m].loads);
      items_.push_back(
          {static_cast<int>(m), static_cast<int>(u), graph_.unit_bytes(static_cast<int>(u), load)});
    }
  }
  int64_t held = pinned_sum_;
  for (size_t g = 0; g < solution_.choice.size(); ++g) {
    const PoolOption& option = pool_.options[static_cast<size_t>(solution_.choice[g])];
    held += option.bytes + option.fixed_bytes;
  }
  result.device_bytes = held;
  if (!packer_.pack(items_, windows_, held - problem.budget_bytes, chosen_)) return false;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (!chosen_[i]) continue;
    result.plans[static_cast<size_t>(items_[i].microbatch)]
        .residency[static_cast<size_t>(items_[i].unit)] = kOffload;
    result.device_bytes -= items_[i].bytes;
  }
  return true;
}

// Of whole tensors, which is what will be copied.
void StagePlanner::price(const StageProblem& problem, StagePlan& result) const {
  result.exposed_ns = 0;
  result.offloaded_bytes.assign(result.plans.size(), 0);
  const auto& components = frontier_.components();
  int64_t host = 0;
  for (size_t m = 0; m < result.plans.size(); ++m) {
    int64_t compute = 0;
    for (size_t c = 0; c < components.size(); ++c) {
      compute += pool_.options[static_cast<size_t>(solution_.choice[m * components.size() + c])].ns;
    }
    for (size_t u = 0; u < graph_.units.size(); ++u) {
      if (result.plans[m].residency[u] != kOffload) continue;
      result.offloaded_bytes[m] +=
          graph_.unit_bytes(static_cast<int>(u),
                            graph_.load_of(graph_.units[u].layer, *problem.microbatches[m].loads));
    }
    host += result.offloaded_bytes[m];
    const StageMicrobatch& limits = problem.microbatches[m];
    const int64_t past = result.offloaded_bytes[m] - limits.free_link_bytes;
    if (past > 0 && problem.link_ns_per_byte <= 0) result.feasible = false;
    result.exposed_ns +=
        std::max<int64_t>(0, compute - limits.bubble_ns) + link_ns(problem.link_ns_per_byte, past);
  }
  if (problem.host_budget_bytes > 0 && host > problem.host_budget_bytes) result.feasible = false;
}

}  // namespace bagualu
