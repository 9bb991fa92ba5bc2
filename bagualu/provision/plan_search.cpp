#include "bagualu/provision/plan_search.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "bagualu/provision/plan_cost.h"

namespace bagualu {
namespace {

constexpr int kMaxRounds = 5;
constexpr int kMaxTakeBacks = 48;
constexpr int64_t kExactNodes = 100'000;
constexpr int64_t kClosingNodes = 300;
constexpr int kMaxReplays = 4'000;
constexpr int64_t kNoCost = std::numeric_limits<int64_t>::max();

int64_t compute_ns(const ProvisionContext& context) {
  int64_t sum = 0;
  for (int i = 0; i < static_cast<int>(context.graph->ops.size()); ++i) {
    sum += context.cost->forward_ns(*context.graph, i, context.balanced) +
           context.cost->backward_ns(*context.graph, i, context.balanced);
  }
  return sum;
}

// An offload that is not over, or storages on the host: flags change what the base itself holds.
bool has_offloads(const MicrobatchState& state) {
  return std::any_of(state.storage.begin(), state.storage.end(), [](StorageFate fate) {
    return fate == StorageFate::kDraining || fate == StorageFate::kHost;
  });
}

}  // namespace

PoolTolerance search_tolerance(const ProvisionContext& context) {
  PoolTolerance tolerance = PoolTolerance::at_gate();
  // What the closing search leaves open goes to cover_all_points(), which takes longer than it.
  tolerance.max_states = 600;
  tolerance.max_work = 60'000;
  tolerance.absolute_ns = std::min<int64_t>(tolerance.absolute_ns, compute_ns(context) / 2000);
  return tolerance;
}

PlanSearch::PlanSearch(const ProvisionContext& context, Predictor& predictor)
    : context_(context),
      graph_(*context.graph),
      predictor_(predictor),
      tolerance_(search_tolerance(context)),
      options_(context) {
  pool_solver_.reserve(tolerance_);
}

SearchResult PlanSearch::cheapest(const GateInput& input, const Plan& base,
                                  const SearchScope& scope, const Plan* incumbent) {
  // Cheapest first: each next one waits for more copies and holds fewer bytes.
  constexpr std::array<Flags, 3> kFlags = {{{false, true}, {false, false}, {true, false}}};
  const bool same_profile = !has_offloads(*input.state);
  SearchResult best;
  if (incumbent != nullptr) {
    best.plan = *incumbent;
    best.prediction = predictor_.predict(input, best.plan);
    best.found = predictor_.fits(best.prediction);
    if (best.found) price(input, best);
  }
  int64_t bound = kNoCost;
  for (const Flags& flags : kFlags) {
    if (&flags != kFlags.begin() && best.found && wide_bound_ns_ >= 0 &&
        best.cost_ns - wide_bound_ns_ <= accepted_gap(best.cost_ns)) {
      bound = std::min(bound, wide_bound_ns_);
      break;
    }
    Plan start = base;
    start.eager_drain = flags.eager_drain;
    start.prefetch = flags.prefetch;
    prepare(input, start, scope, same_profile && &flags != kFlags.begin());
    const int point = hardest_point(high_, input.state->next_op);
    if (&flags == kFlags.begin()) {
      wide_bound_ns_ = -1;
      if (same_profile) {
        build_pool(point, /*wide=*/true);
        relaxation_.solve(pool_);
        if (relaxation_.feasible()) wide_bound_ns_ = past_ns_ + relaxation_.bound_ns();
      }
    }
    build_pool(point, /*wide=*/false);
    const int64_t gap = accepted_gap(best.cost_ns);
    if (best.found) {
      relaxation_.solve(pool_);
      const int64_t relaxed = past_ns_ + relaxation_.bound_ns();
      if (!relaxation_.feasible()) continue;
      if (best.cost_ns - relaxed <= gap) {
        bound = std::min(bound, relaxed);
        continue;
      }
    }
    pool_solver_.solve(pool_, tolerance_, pool_solution_);
    const int64_t bound_here = past_ns_ + pool_solution_.bound_ns;
    if (!pool_solution_.feasible) continue;
    bound = std::min(bound, bound_here);
    if (best.found && best.cost_ns - bound_here <= gap) continue;
    SearchResult result = cover_one_point(input, start);
    result.bound_ns = bound_here;
    if (!good_enough(result)) result = cover_all_points(input, start, std::move(result));
    if (result.found && (!best.found || result.cost_ns < best.cost_ns)) best = std::move(result);
  }
  best.bound_ns = best.found ? std::min(bound, best.cost_ns) : 0;
  return best;
}

void PlanSearch::prepare(const GateInput& input, const Plan& base, const SearchScope& scope,
                         bool same_profile) {
  options_.collect(input, base, scope, predictor_);
  if (!same_profile) predictor_.profile(input, base, first_high_);
  high_ = first_high_;
  past_ns_ = plan_cost_ns(context_, predictor_.loads(), *input.state, base);
}

int64_t PlanSearch::accepted_gap(int64_t cost_ns) const {
  return open_units_ <= kExactUnits ? 0 : tolerance_.gap_ns(cost_ns);
}

bool PlanSearch::good_enough(const SearchResult& result) const {
  return result.found && result.cost_ns - result.bound_ns <= accepted_gap(result.cost_ns);
}

int PlanSearch::hardest_point(const std::vector<int64_t>& high, int first_point) const {
  return static_cast<int>(std::max_element(high.begin() + first_point, high.end()) - high.begin());
}

// One group per unit: nothing, or one of its options, by what they save at this point. `wide`: as
// if every offload were gone from the device at this point, whatever the flags; a bound for all of
// them.
void PlanSearch::build_pool(int point, bool wide) {
  pool_.clear();
  pool_.microbatches.resize(1);
  pool_option_.clear();
  int64_t all = 0;
  const auto& options = options_.list();
  for (size_t begin = 0, end; begin < options.size(); begin = end) {
    const int first = static_cast<int>(pool_.options.size());
    int64_t most = 0;
    pool_.options.push_back({0, 0});
    pool_option_.push_back(-1);
    for (end = begin; end < options.size() && options_.same_unit(options[begin], options[end]);
         ++end) {
      int64_t saving = options_.saving_at(options[end], point);
      if (wide) saving = std::max(saving, options[end].host_bytes);
      if (saving <= 0) continue;
      most = std::max(most, saving);
      pool_.options.push_back({-saving, options[end].cost_ns});
      pool_option_.push_back(static_cast<int>(end));
    }
    if (most == 0) {
      pool_.options.pop_back();
      pool_option_.pop_back();
      continue;
    }
    for (size_t o = static_cast<size_t>(first); o < pool_.options.size(); ++o) {
      pool_.options[o].bytes += most;
    }
    all += most;
    pool_.groups.push_back({first, static_cast<int>(pool_.options.size()), 0});
  }
  open_units_ = static_cast<int>(pool_.groups.size());
  pool_.budget_bytes = all - std::max<int64_t>(0, high_[point] - context_.activation_budget_bytes);
}

// Carries the choice out and fills exact_. What raised needs may have taken too much is taken back.
// Returns: true if it fits; the result then has its price.
bool PlanSearch::replay_chosen(const GateInput& input, const Plan& base,
                               const std::vector<int>& chosen, bool raised, SearchResult& result) {
  apply(input, base, chosen, result);
  result.prediction = predictor_.profile(after_demotion(input, result), result.plan, exact_);
  result.found = predictor_.fits(result.prediction);
  if (!result.found) return false;
  if (raised) take_back(input, base, result);
  price(input, result);
  return true;
}

// pool_solution_ covers the hardest point. Replays tell whether other points miss bytes.
SearchResult PlanSearch::cover_one_point(const GateInput& input, const Plan& base) {
  SearchResult result;
  for (int round = 0; round < kMaxRounds && pool_solution_.feasible; ++round) {
    std::vector<int> chosen;
    for (int option : pool_solution_.choice) {
      if (pool_option_[option] >= 0) chosen.push_back(pool_option_[option]);
    }
    if (replay_chosen(input, base, chosen, round > 0, result)) return result;
    const int next = hardest_point(exact_, input.state->next_op);
    if (!raise_needs(chosen)) break;
    build_pool(next, /*wide=*/false);
    pool_solver_.solve(pool_, tolerance_, pool_solution_);
  }
  result.found = false;
  return result;
}

SearchResult PlanSearch::cover_all_points(const GateInput& input, const Plan& base,
                                          SearchResult known) {
  SearchResult result;
  result.bound_ns = known.bound_ns;
  high_ = first_high_;
  problem_.host_free_bytes = context_.host_budget_bytes == 0
                                 ? kNoCost / 2
                                 : context_.host_budget_bytes - input.memory.host_live_bytes;
  for (int round = 0; round < kMaxRounds; ++round) {
    build_problem(input.state->next_op);
    if (round == 0) {
      first_problem_ = problem_;
      first_cover_option_ = cover_option_;
    }
    CoverChoice choice;
    if (!cover_.improve(problem_, choice)) break;
    const std::vector<int> chosen = chosen_options(choice);
    if (replay_chosen(input, base, chosen, round > 0, result)) break;
    if (!raise_needs(chosen)) break;
  }
  if (known.found && (!result.found || known.cost_ns <= result.cost_ns)) result = std::move(known);
  std::swap(cover_option_, first_cover_option_);
  if (!good_enough(result)) close(input, base, first_problem_, result);
  return result;
}

// Points between two ends of segments are covered by the same options, so only the highest counts.
void PlanSearch::build_problem(int first_point) {
  const int points = static_cast<int>(high_.size());
  const auto& segments = options_.segments();
  is_break_.assign(high_.size() + 1, 0);
  for (const CoverSegment& segment : segments)
    is_break_[segment.begin] = is_break_[segment.end] = 1;
  constraints_before_.assign(high_.size() + 1, 0);
  problem_.need_bytes.clear();
  int64_t need = 0;
  for (int p = first_point; p <= points; ++p) {
    if (is_break_[p] || p == points) {
      if (need > 0) problem_.need_bytes.push_back(need);
      need = 0;
    }
    constraints_before_[p] = static_cast<int>(problem_.need_bytes.size());
    if (p < points) need = std::max(need, high_[p] - context_.activation_budget_bytes);
  }
  problem_.segments.clear();
  problem_.options.clear();
  problem_.group_begin.clear();
  cover_option_.clear();
  const auto& options = options_.list();
  int last = -1;
  for (int c = 0; c < static_cast<int>(options.size()); ++c) {
    CoverOption option;
    option.first_segment = static_cast<int>(problem_.segments.size());
    for (int i = options[c].first_segment; i < options[c].end_segment; ++i) {
      const int begin = constraints_before_[segments[i].begin];
      const int end = constraints_before_[segments[i].end];
      if (begin < end) problem_.segments.push_back({begin, end, segments[i].bytes});
    }
    option.end_segment = static_cast<int>(problem_.segments.size());
    if (option.first_segment == option.end_segment) continue;
    if (last < 0 || !options_.same_unit(options[last], options[c])) {
      problem_.group_begin.push_back(static_cast<int>(problem_.options.size()));
    }
    last = c;
    option.group = static_cast<int>(problem_.group_begin.size()) - 1;
    option.cost_ns = options[c].cost_ns;
    option.host_bytes = options[c].host_bytes;
    problem_.options.push_back(option);
    cover_option_.push_back(c);
  }
  problem_.group_begin.push_back(static_cast<int>(problem_.options.size()));
}

std::vector<int> PlanSearch::chosen_options(const CoverChoice& choice) const {
  std::vector<int> chosen;
  for (int option : choice) {
    if (option >= 0) chosen.push_back(cover_option_[option]);
  }
  return chosen;
}

void PlanSearch::apply(const GateInput& input, const Plan& base, const std::vector<int>& chosen,
                       SearchResult& result) const {
  result.plan = base;
  result.resting_plans.clear();
  for (int c : chosen) {
    const SearchOption& option = options_.list()[c];
    if (option.microbatch < 0) {
      result.plan.residency[option.unit] = option.residency;
      continue;
    }
    if (result.resting_plans.empty()) {
      for (const RestingMicrobatch& resting : input.resting) {
        result.resting_plans.push_back(*resting.plan);
      }
    }
    result.resting_plans[option.microbatch].residency[option.unit] = option.residency;
  }
}

GateInput PlanSearch::after_demotion(const GateInput& input, const SearchResult& result) const {
  GateInput after = input;
  for (size_t m = 0; m < result.resting_plans.size(); ++m) {
    const RestingMicrobatch& resting = input.resting[m];
    if (result.resting_plans[m] == *resting.plan) continue;
    const MicrobatchBytes bytes = resting_microbatch_bytes(
        graph_, *resting.state, result.resting_plans[m], memory_table(graph_, *resting.loads));
    const int64_t freed = resting.bytes.rest_bytes - bytes.rest_bytes;
    after.memory.live_bytes -= freed;
    after.resting_bytes -= freed;
    after.memory.host_live_bytes += bytes.host_rest_bytes - resting.bytes.host_rest_bytes;
    after.resting[m].bytes = bytes;
  }
  return after;
}

// Takes the last replay for the truth: what the choice was believed to save goes on top of it.
// Returns: false if that changes nothing, so that searching again would be in vain.
bool PlanSearch::raise_needs(const std::vector<int>& chosen) {
  const auto& segments = options_.segments();
  for (int c : chosen) {
    const SearchOption& option = options_.list()[c];
    for (int i = option.first_segment; i < option.end_segment; ++i) {
      for (int p = segments[i].begin; p < segments[i].end; ++p) {
        if (exact_[p] > 0) exact_[p] += segments[i].bytes;
      }
    }
  }
  bool raised = false;
  for (size_t p = 0; p < high_.size(); ++p) {
    raised = raised || (exact_[p] > high_[p] && exact_[p] > context_.activation_budget_bytes);
    high_[p] = std::max(high_[p], exact_[p]);
  }
  return raised;
}

void PlanSearch::price(const GateInput& input, SearchResult& result) const {
  result.cost_ns = plan_cost_ns(context_, predictor_.loads(), *input.state, result.plan);
  for (size_t m = 0; m < result.resting_plans.size(); ++m) {
    const RestingMicrobatch& resting = input.resting[m];
    for (int u = 0; u < static_cast<int>(graph_.units.size()); ++u) {
      const ResidencyId now = result.resting_plans[m].residency[u];
      if (now == resting.plan->residency[u]) continue;
      result.cost_ns += unit_cost_ns(context_, *resting.loads, u, now, /*drains_now=*/true,
                                     resting.plan->prefetch);
    }
  }
}

void PlanSearch::close(const GateInput& input, const Plan& base, const CoverProblem& problem,
                       SearchResult& result) {
  int replays_left = kMaxReplays;
  const bool exact = problem.groups() <= kExactUnits;
  if (!exact) replays_left = 8;
  SearchResult trial, accepted;
  const auto accept = [&](const CoverChoice& choice) {
    if (replays_left-- <= 0) return false;
    apply(input, base, chosen_options(choice), trial);
    trial.prediction = predictor_.predict(after_demotion(input, trial), trial.plan);
    if (!predictor_.fits(trial.prediction)) return false;
    accepted = trial;
    return true;
  };
  int64_t cost = result.found ? result.cost_ns - past_ns_ : kNoCost;
  CoverChoice choice;
  if (!cover_.close(problem, exact ? kExactNodes : kClosingNodes, accept, choice, cost)) return;
  accepted.bound_ns = result.bound_ns;
  result = std::move(accepted);
  result.found = true;
  price(input, result);
}

void PlanSearch::take_back(const GateInput& input, const Plan& base, SearchResult& result) {
  std::vector<std::pair<int64_t, int>> given_up;  // negative cost: most expensive first
  for (int u = 0; u < static_cast<int>(base.residency.size()); ++u) {
    if (result.plan.residency[u] == base.residency[u]) continue;
    const bool drains_now =
        result.plan.eager_drain || options_.lifetimes().retired(u, *input.state);
    given_up.emplace_back(-unit_cost_ns(context_, predictor_.loads(), u, result.plan.residency[u],
                                        drains_now, result.plan.prefetch),
                          u);
  }
  std::sort(given_up.begin(), given_up.end());
  if (given_up.size() > kMaxTakeBacks) given_up.resize(kMaxTakeBacks);
  const GateInput after = after_demotion(input, result);
  for (const auto& [cost, unit] : given_up) {
    const ResidencyId old = result.plan.residency[unit];
    result.plan.residency[unit] = base.residency[unit];
    const Prediction prediction = predictor_.predict(after, result.plan);
    if (predictor_.fits(prediction)) {
      result.prediction = prediction;
    } else {
      result.plan.residency[unit] = old;
    }
  }
}

SearchResult PlanSearch::survival(const GateInput& input) {
  SearchResult result;
  result.plan = options_.survival();
  keep_past_choices(graph_, *input.state, result.plan);
  for (const RestingMicrobatch& resting : input.resting) {
    Plan plan = options_.survival();
    keep_past_choices(graph_, *resting.state, plan);
    result.resting_plans.push_back(std::move(plan));
  }
  result.prediction = predictor_.predict(after_demotion(input, result), result.plan);
  result.found = predictor_.fits(result.prediction);
  return result;
}

SearchResult PlanSearch::last_resort(const GateInput& input, const Plan& base) {
  SearchResult result = survival(input);
  if (result.found) {
    take_back_resting(input, result);
    Plan start = base;
    start.eager_drain = true;
    start.prefetch = false;
    take_back(input, start, result);
  }
  price(input, result);
  return result;
}

// Whole micro-batches, the youngest first: what is given up by it is given up for longest.
void PlanSearch::take_back_resting(const GateInput& input, SearchResult& result) {
  for (size_t m = input.resting.size(); m-- > 0;) {
    if (result.resting_plans[m] == *input.resting[m].plan) continue;
    Plan given_up = std::exchange(result.resting_plans[m], *input.resting[m].plan);
    const Prediction prediction = predictor_.predict(after_demotion(input, result), result.plan);
    if (predictor_.fits(prediction)) {
      result.prediction = prediction;
    } else {
      result.resting_plans[m] = std::move(given_up);
    }
  }
}

}  // namespace bagualu
