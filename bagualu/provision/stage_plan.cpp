#include "bagualu/provision/stage_plan.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr int kMaxSpares = 3;
constexpr size_t kMaxMoves = 40;
constexpr size_t kMaxSplitUnits = 5;  // of one component that are saved or offloaded one by one

// Where whole tensors miss the pool's optimum, being exact about the pool is no help.
PoolTolerance without_closing(PoolTolerance tolerance) {
  tolerance.max_work = 0;
  return tolerance;
}

}  // namespace

int64_t link_ns(double ns_per_byte, int64_t bytes) {
  if (bytes <= 0) return 0;
  return static_cast<int64_t>(std::ceil(ns_per_byte * static_cast<double>(bytes)));
}

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
    slot.pinned_bytes += frontier_.unit_bytes(u, graph_.load_of(graph_.units[u].layer, loads));
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
  solve_and_pack(problem, 0, result);
  result.bound_ns = solution_.bound_ns;
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
  search_choices(problem, result);
  if (good_enough(result)) return;
  if (!result.feasible && !take_least(problem, result)) return;
  search_tensors(problem, result);
}

bool StagePlanner::good_enough(const StagePlan& result) const {
  return result.feasible &&
         result.exposed_ns - result.bound_ns <= tolerance_.gap_ns(result.exposed_ns);
}

// The relaxation takes encoded copies for bytes that a window carries off, and so it uses them where
// a window is free. Tried without them there.
void StagePlanner::avoid_codes_in_windows(const StageProblem& problem, StagePlan& result) {
  const bool has_codes =
      std::any_of(pool_.options.begin(), pool_.options.end(),
                  [](const PoolOption& option) { return option.fixed_bytes > 0; });
  const bool has_windows = std::any_of(windows_.begin(), windows_.end(),
                                       [](int64_t window) { return window > 0; });
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
  solve_and_pack(problem, 0, attempt_);
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
    const PoolTolerance tolerance = std::exchange(tolerance_, without_closing(tolerance_));
    solve_and_pack(problem, spare, attempt_);
    tolerance_ = tolerance;
    if (!solution_.feasible) return;
    const bool better =
        attempt_.feasible && (!result.feasible || attempt_.exposed_ns < result.exposed_ns);
    const bool lost = !attempt_.feasible && !result.feasible;
    if (better || lost) std::swap(result, attempt_);
    if (!lost) return;
  }
}

// One or two other options of the pool, the best by the pool first, packed anew: another tensor may
// leave another hole in a window.
void StagePlanner::search_choices(const StageProblem& problem, StagePlan& result) {
  if (!solution_.feasible || !result.feasible) return;
  relaxation_.solve(pool_);
  totals_.load(pool_, pool_choice(result));
  for (int left = tolerance_.max_packings; left > 0 && !good_enough(result);) {
    list_candidates(result.exposed_ns);
    bool improved = false;
    for (size_t c = 0; c < candidates_.size() && left > 0 && !improved; ++c, --left) {
      const Candidate& candidate = candidates_[c];
      solution_.choice = totals_.choice();
      solution_.choice[static_cast<size_t>(pool_group(candidate.option))] = candidate.option;
      if (candidate.other >= 0) {
        solution_.choice[static_cast<size_t>(pool_group(candidate.other))] = candidate.other;
      }
      carry_out(problem, attempt_);
      improved = attempt_.feasible && attempt_.exposed_ns < result.exposed_ns;
      if (!improved) continue;
      attempt_.bound_ns = result.bound_ns;
      std::swap(result, attempt_);
      totals_.load(pool_, solution_.choice);
    }
    if (!improved) return;
  }
}

int StagePlanner::pool_group(int option) const {
  const auto after = std::upper_bound(
      pool_.groups.begin(), pool_.groups.end(), option,
      [](int value, const PoolGroup& group) { return value < group.first_option; });
  return static_cast<int>(after - pool_.groups.begin()) - 1;
}

void StagePlanner::list_candidates(int64_t below_ns) {
  moves_.clear();
  for (int g = 0; g < static_cast<int>(pool_.groups.size()); ++g) {
    for (int o = pool_.groups[g].first_option; o < pool_.groups[g].end_option; ++o) {
      if (o != totals_.choice()[g]) moves_.emplace_back(relaxation_.reduced_cost(g, o), o);
    }
  }
  if (moves_.size() > kMaxMoves) {
    std::nth_element(moves_.begin(), moves_.begin() + kMaxMoves, moves_.end());
    moves_.resize(kMaxMoves);
  }
  candidates_.clear();
  for (size_t i = 0; i < moves_.size(); ++i) {
    const int o = moves_[i].second, g = pool_group(o);
    const int64_t alone = totals_.cost_with(g, o);
    if (alone < below_ns) candidates_.push_back({alone, o, -1});
    for (size_t j = i + 1; j < moves_.size(); ++j) {
      const int q = moves_[j].second, h = pool_group(q);
      if (g == h) continue;
      const int64_t both = totals_.cost_with(g, o, h, q);
      if (both < below_ns) candidates_.push_back({both, o, q});
    }
  }
  std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
    return std::tie(a.pool_ns, a.option, a.other) < std::tie(b.pool_ns, b.option, b.other);
  });
}

// The pool's options that a plan stands for.
std::vector<int> StagePlanner::pool_choice(const StagePlan& result) const {
  const auto& components = frontier_.components();
  std::vector<int> choice;
  for (size_t g = 0; g < pool_.groups.size(); ++g) {
    const FrontierComponent& component = components[g % components.size()];
    const Plan& plan = result.plans[g / components.size()];
    int found = pool_.groups[g].first_option;
    for (size_t o = 0; o < component.options.size(); ++o) {
      bool same = true;
      for (size_t i = 0; i < component.units.size() && same; ++i) {
        const ResidencyId has = plan.residency[static_cast<size_t>(component.units[i])];
        same = component.options[o].choice[i] == (has == kOffload ? kSave : has);
      }
      if (same) found = pool_.groups[g].first_option + static_cast<int>(o);
    }
    choice.push_back(found);
  }
  return choice;
}

// Options of a component with whole tensors: each of the frontier's, and each set of retained units
// that goes over the link. What is never better is left out.
void StagePlanner::add_tensor_options(int component, int microbatch, const StageProblem& problem) {
  const FrontierComponent& spec = frontier_.components()[static_cast<size_t>(component)];
  const LayerLoad& load =
      graph_.load_of(spec.layer, *problem.microbatches[static_cast<size_t>(microbatch)].loads);
  const Slot& slot = slots_[static_cast<size_t>(microbatch)];
  const int first = static_cast<int>(tensors_.options.size());
  for (size_t o = 0; o < spec.options.size(); ++o) {
    const OptionValue& value =
        slot.values[static_cast<size_t>(first_value_[static_cast<size_t>(component)]) + o];
    std::vector<int> retained;
    for (size_t i = 0; i < spec.units.size(); ++i) {
      if (spec.options[o].choice[i] == kSave) retained.push_back(static_cast<int>(i));
    }
    const bool every_set = retained.size() <= kMaxSplitUnits;
    const uint32_t sets = every_set ? 1u << retained.size() : 2u;
    for (uint32_t set = 0; set < sets; ++set) {
      TensorChoice choice{static_cast<int>(o), 0};
      int64_t link = 0;
      for (size_t i = 0; i < retained.size(); ++i) {
        if (every_set ? (set >> i & 1u) == 0 : set == 0) continue;
        choice.offloaded |= 1u << retained[i];
        link += frontier_.unit_bytes(spec.units[static_cast<size_t>(retained[i])], load);
      }
      const TensorOption option{value.bytes() - link, link, value.compute_ns};
      const auto never_better = [&](const TensorOption& a) {
        return a.device_bytes <= option.device_bytes && a.link_bytes <= option.link_bytes &&
               a.ns <= option.ns;
      };
      if (std::any_of(tensors_.options.begin() + first, tensors_.options.end(), never_better)) {
        continue;
      }
      tensors_.options.push_back(option);
      tensor_choices_.push_back(choice);
    }
  }
  tensors_.groups.push_back({first, static_cast<int>(tensors_.options.size()), microbatch});
}

void StagePlanner::search_tensors(const StageProblem& problem, StagePlan& result) {
  tensors_ = {};
  tensor_choices_.clear();
  tensors_.budget_bytes = problem.budget_bytes - pinned_sum_;
  tensors_.host_bytes = problem.host_budget_bytes > 0 ? problem.host_budget_bytes : INT64_MAX / 8;
  tensors_.link_ns_per_byte = problem.link_ns_per_byte;
  const auto& components = frontier_.components();
  for (size_t m = 0; m < problem.microbatches.size(); ++m) {
    tensors_.window_bytes.push_back(problem.microbatches[m].free_link_bytes);
    tensors_.bubble_ns.push_back(problem.microbatches[m].bubble_ns);
    for (size_t c = 0; c < components.size(); ++c) {
      add_tensor_options(static_cast<int>(c), static_cast<int>(m), problem);
    }
  }
  tensor_choice_.clear();
  for (const TensorGroup& group : tensors_.groups) {
    tensor_choice_.push_back(start_option(group, tensor_choice_.size(), result));
  }
  const bool proven = tensor_search_.improve(
      tensors_, result.bound_ns + tolerance_.gap_ns(result.bound_ns), tolerance_.max_trials, tensor_choice_);
  const bool better = tensor_search_.feasible() &&
                      (!result.feasible || tensor_search_.cost_ns() < result.exposed_ns);
  if (better) take_tensors(problem, result);
  if (proven && result.feasible) {
    result.bound_ns = result.exposed_ns;
    result.closed = true;
  }
}

// The plan that holds least: everything that can be rebuilt is dropped, and as much of the rest as
// fits is offloaded. Returns: false if even that is too much; the missing bytes are then known.
bool StagePlanner::take_least(const StageProblem& problem, StagePlan& result) {
  stubborn_.clear();
  std::vector<int64_t> link_bytes;
  for (size_t m = 0; m < problem.microbatches.size(); ++m) {
    const StageMicrobatch& microbatch = problem.microbatches[m];
    link_bytes.push_back(problem.link_ns_per_byte > 0 ? INT64_MAX / 64
                                                      : microbatch.free_link_bytes);
    result.plans[m] = uniform_plan(graph_, kRecompute);
    for (int u = 0; u < static_cast<int>(graph_.units.size()); ++u) {
      if (graph_.units[u].pinned || graph_.units[u].rebuild != Rebuild::kNever) continue;
      const LayerLoad& load = graph_.load_of(graph_.units[u].layer, *microbatch.loads);
      stubborn_.push_back({static_cast<int>(m), u, frontier_.unit_bytes(u, load),
                           frontier_.least_kept_bytes(u, load)});
    }
  }
  const int64_t host = problem.host_budget_bytes > 0 ? problem.host_budget_bytes : INT64_MAX / 8;
  const LeastDevice least = least_device(stubborn_, std::move(link_bytes), host);
  for (size_t i = 0; i < stubborn_.size(); ++i) {
    if (!least.offloaded[i]) continue;
    result.plans[static_cast<size_t>(stubborn_[i].microbatch)]
        .residency[static_cast<size_t>(stubborn_[i].unit)] = kOffload;
  }
  result.missing_bytes =
      std::max<int64_t>(0, pinned_sum_ + least.bytes - problem.budget_bytes);
  return result.missing_bytes == 0;
}

// The option that says what the plan so far does, or the nearest there is.
int StagePlanner::start_option(const TensorGroup& group, size_t index,
                               const StagePlan& result) const {
  const auto& components = frontier_.components();
  const FrontierComponent& component = components[index % components.size()];
  const Plan& plan = result.plans[index / components.size()];
  int best = group.first_option, most = -1;
  for (int o = group.first_option; o < group.end_option; ++o) {
    const TensorChoice& choice = tensor_choices_[static_cast<size_t>(o)];
    int equal = 0;
    for (size_t i = 0; i < component.units.size(); ++i) {
      equal += tensor_residency(component, choice, i) ==
                       plan.residency[static_cast<size_t>(component.units[i])]
                   ? 1
                   : 0;
    }
    if (equal <= most) continue;
    most = equal;
    best = o;
  }
  return best;
}

ResidencyId StagePlanner::tensor_residency(const FrontierComponent& component,
                                           const TensorChoice& choice, size_t unit) const {
  if (choice.offloaded >> unit & 1u) return kOffload;
  return component.options[static_cast<size_t>(choice.option)].choice[unit];
}

void StagePlanner::take_tensors(const StageProblem& problem, StagePlan& result) {
  const auto& components = frontier_.components();
  result.device_bytes = pinned_sum_;
  result.offloaded_bytes.assign(problem.microbatches.size(), 0);
  for (size_t g = 0; g < tensor_choice_.size(); ++g) {
    const FrontierComponent& component = components[g % components.size()];
    const size_t m = g / components.size();
    const auto at = static_cast<size_t>(tensor_choice_[g]);
    for (size_t i = 0; i < component.units.size(); ++i) {
      result.plans[m].residency[static_cast<size_t>(component.units[i])] =
          tensor_residency(component, tensor_choices_[at], i);
    }
    result.device_bytes += tensors_.options[at].device_bytes;
    result.offloaded_bytes[m] += tensors_.options[at].link_bytes;
  }
  result.feasible = true;
  result.missing_bytes = 0;
  result.exposed_ns = tensor_search_.cost_ns();
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
                                  StagePlan& result) {
  const int64_t budget = pool_.budget_bytes;
  pool_.budget_bytes -= spare_bytes;
  last_spare_ = spare_bytes;
  solver_.solve(pool_, tolerance_, solution_);
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
      items_.push_back({static_cast<int>(m), static_cast<int>(u),
                        frontier_.unit_bytes(static_cast<int>(u), load)});
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
      result.offloaded_bytes[m] += frontier_.unit_bytes(
          static_cast<int>(u),
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
