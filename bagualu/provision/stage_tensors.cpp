// The part of StagePlanner that knows whole tensors: what the pool's optimum becomes where windows
// and tensors do not fit together.
#include <algorithm>
#include <tuple>
#include <utility>

#include "bagualu/provision/stage_plan.h"

namespace bagualu {
namespace {

constexpr size_t kMaxMoves = 40;
constexpr size_t kMaxSplitUnits = 5;  // of one component that are saved or offloaded one by one

}  // namespace

// Where whole tensors miss the pool's optimum, being exact about the pool is no help.
PoolTolerance StagePlanner::without_closing(PoolTolerance tolerance) {
  tolerance.max_work = 0;
  return tolerance;
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

// The largest components decide what fits with what: each of their other options is forced, and
// everything else chosen anew.
void StagePlanner::force_largest(const StageProblem& problem, StagePlan& result) {
  if (!solution_.feasible || !result.feasible) return;
  std::vector<std::pair<int64_t, int>> largest;  // negative bytes, group
  for (int g = 0; g < static_cast<int>(pool_.groups.size()); ++g) {
    const PoolGroup& group = pool_.groups[g];
    if (group.end_option - group.first_option < 2) continue;
    largest.emplace_back(-pool_.options[group.first_option].bytes, g);
  }
  std::sort(largest.begin(), largest.end());
  if (largest.size() > static_cast<size_t>(tolerance_.max_forced)) {
    largest.resize(static_cast<size_t>(tolerance_.max_forced));
  }
  const PoolTolerance tolerance = without_closing(tolerance_);
  for (const auto& [bytes, g] : largest) {
    const PoolGroup group = pool_.groups[g];
    const int has = pool_choice(result)[static_cast<size_t>(g)];
    for (int o = group.first_option; o < group.end_option; ++o) {
      if (o == has) continue;
      pool_.groups[g].first_option = o;
      pool_.groups[g].end_option = o + 1;
      solver_.solve(pool_, tolerance, solution_);
      pool_.groups[g] = group;
      if (!solution_.feasible) continue;
      carry_out(problem, attempt_);
      if (!attempt_.feasible || attempt_.exposed_ns >= result.exposed_ns) continue;
      attempt_.bound_ns = result.bound_ns;
      std::swap(result, attempt_);
    }
  }
  solution_.feasible = true;
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
        link += graph_.unit_bytes(spec.units[static_cast<size_t>(retained[i])], load);
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
  tensors_.ns_per_byte = ns_per_byte_;
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
  const bool proven =
      tensor_search_.improve(tensors_, result.bound_ns + tolerance_.gap_ns(result.bound_ns),
                             tolerance_.max_trials, tensor_choice_);
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
      stubborn_.push_back({static_cast<int>(m), u, graph_.unit_bytes(u, load),
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
  result.missing_bytes = std::max<int64_t>(0, pinned_sum_ + least.bytes - problem.budget_bytes);
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

}  // namespace bagualu
