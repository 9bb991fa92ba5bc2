#include "bagualu/provision/plan_search.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "bagualu/provision/floor.h"
#include "bagualu/provision/plan_cost.h"

namespace bagualu {
namespace {

constexpr int kMaxRounds = 5;
constexpr int kMaxTakeBacks = 48;
constexpr int64_t kExactNodes = 100'000;
constexpr int64_t kClosingNodes = 300;
constexpr int kMaxReplays = 4'000;

struct Flags {
  bool eager_drain;
  bool prefetch;
};
// Cheapest first: each next one waits for more copies and holds fewer bytes.
constexpr std::array<Flags, 3> kFlags = {{{false, true}, {false, false}, {true, false}}};

}  // namespace

PlanSearch::PlanSearch(const ProvisionContext& context, Predictor& predictor)
    : context_(context),
      graph_(*context.graph),
      predictor_(predictor),
      lifetimes_(graph_),
      survival_(survival_plan(graph_)) {}

bool PlanSearch::allowed(int unit, ResidencyId residency, const SearchScope& scope) const {
  const UnitSpec& spec = graph_.units[unit];
  const ResidencySpec& choice = residencies()[residency];
  if (choice.retire == Retire::kKeep) return false;
  if (choice.changes_numerics && !context_.allow_quantise) return false;
  if (choice.needs_rebuild && (spec.rebuild == Rebuild::kNever || !scope.recompute)) return false;
  return !scope.survival_only || survival_.residency[unit] == residency;
}

void PlanSearch::collect_options(const GateInput& input, const Plan& base,
                                 const SearchScope& scope) {
  candidates_.clear();
  segments_.clear();
  const MemoryTable& table = predictor_.table();
  for (int u = 0; u < static_cast<int>(graph_.units.size()); ++u) {
    if (graph_.units[u].pinned || base.residency[u] != kSave) continue;
    if (lifetimes_.decided(u, *input.state)) continue;
    const bool drains_now = base.eager_drain || lifetimes_.retired(u, *input.state);
    for (size_t r = 1; r < residencies().size(); ++r) {
      const auto residency = static_cast<ResidencyId>(r);
      if (!allowed(u, residency, scope)) continue;
      Candidate candidate;
      candidate.unit = u;
      candidate.residency = residency;
      candidate.first_segment = static_cast<int>(segments_.size());
      lifetimes_.append_segments(u, residency, *input.state, table, base.eager_drain, base.prefetch,
                                 segments_);
      candidate.end_segment = static_cast<int>(segments_.size());
      if (candidate.first_segment == candidate.end_segment) continue;
      if (residencies()[r].retire == Retire::kOffload) {
        for (int s : graph_.units[u].storages) candidate.host_bytes += table.storage_bytes[s];
      }
      candidate.cost_ns =
          unit_cost_ns(context_, predictor_.loads(), u, residency, drains_now, base.prefetch);
      candidates_.push_back(candidate);
    }
  }
}

// Points between two ends of segments are covered by the same options, so only the highest counts.
void PlanSearch::build_problem(int first_point) {
  const int points = static_cast<int>(high_.size());
  is_break_.assign(high_.size() + 1, 0);
  for (const CoverSegment& segment : segments_)
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
  option_candidate_.clear();
  int last_unit = -1;
  for (int c = 0; c < static_cast<int>(candidates_.size()); ++c) {
    const Candidate& candidate = candidates_[c];
    CoverOption option;
    option.first_segment = static_cast<int>(problem_.segments.size());
    for (int i = candidate.first_segment; i < candidate.end_segment; ++i) {
      const int begin = constraints_before_[segments_[i].begin];
      const int end = constraints_before_[segments_[i].end];
      if (begin < end) problem_.segments.push_back({begin, end, segments_[i].bytes});
    }
    option.end_segment = static_cast<int>(problem_.segments.size());
    if (option.first_segment == option.end_segment) continue;
    if (candidate.unit != last_unit) {
      problem_.group_begin.push_back(static_cast<int>(problem_.options.size()));
      last_unit = candidate.unit;
    }
    option.group = static_cast<int>(problem_.group_begin.size()) - 1;
    option.cost_ns = candidate.cost_ns;
    option.host_bytes = candidate.host_bytes;
    problem_.options.push_back(option);
    option_candidate_.push_back(c);
  }
  problem_.group_begin.push_back(static_cast<int>(problem_.options.size()));
}

Plan PlanSearch::apply(const Plan& base, const CoverChoice& choice) const {
  Plan plan = base;
  for (int option : choice) {
    if (option < 0) continue;
    const Candidate& candidate = candidates_[option_candidate_[option]];
    plan.residency[candidate.unit] = candidate.residency;
  }
  return plan;
}

// Takes the last replay for the truth: what the choice was believed to save goes on top of it.
// Returns: false if that changes nothing, so that searching again would be in vain.
bool PlanSearch::raise_needs(const CoverChoice& choice) {
  for (int option : choice) {
    if (option < 0) continue;
    const Candidate& candidate = candidates_[option_candidate_[option]];
    for (int i = candidate.first_segment; i < candidate.end_segment; ++i) {
      for (int p = segments_[i].begin; p < segments_[i].end; ++p) {
        if (exact_[p] > 0) exact_[p] += segments_[i].bytes;
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

void PlanSearch::finish(const GateInput& input, SearchResult& result) const {
  result.cost_ns = plan_cost_ns(context_, predictor_.loads(), *input.state, result.plan);
}

void PlanSearch::close(const GateInput& input, const Plan& base, const CoverProblem& problem,
                       SearchResult& result) {
  int replays_left = kMaxReplays;
  const bool exact = problem.groups() <= kExactUnits;
  if (!exact) replays_left = 8;
  Prediction accepted;
  const auto accept = [&](const CoverChoice& choice) {
    if (replays_left-- <= 0) return false;
    const Prediction prediction = predictor_.predict(input, apply(base, choice));
    if (!predictor_.fits(prediction)) return false;
    accepted = prediction;
    return true;
  };
  const int64_t base_cost = plan_cost_ns(context_, predictor_.loads(), *input.state, base);
  int64_t cost = result.found ? result.cost_ns - base_cost : std::numeric_limits<int64_t>::max();
  CoverChoice choice;
  if (!search_.close(problem, exact ? kExactNodes : kClosingNodes, accept, choice, cost)) return;
  result.found = true;
  result.plan = apply(base, choice);
  result.prediction = accepted;
  finish(input, result);
}

SearchResult PlanSearch::try_flags(const GateInput& input, const Plan& base,
                                   const SearchScope& scope, int64_t known_cost_ns) {
  SearchResult result;
  collect_options(input, base, scope);
  predictor_.profile(input, base, high_);
  problem_.host_free_bytes = context_.host_budget_bytes == 0
                                 ? std::numeric_limits<int64_t>::max() / 2
                                 : context_.host_budget_bytes - input.memory.host_live_bytes;
  for (int round = 0; round < kMaxRounds; ++round) {
    build_problem(input.state->next_op);
    if (round == 0) {
      first_problem_ = problem_;
      first_option_candidate_ = option_candidate_;
      const int64_t past = plan_cost_ns(context_, predictor_.loads(), *input.state, base);
      if (past + search_.least_cost_ns(problem_) >= known_cost_ns) return result;
    }
    CoverChoice choice;
    if (!search_.improve(problem_, choice)) break;
    result.plan = apply(base, choice);
    result.prediction = predictor_.profile(input, result.plan, exact_);
    result.found = predictor_.fits(result.prediction);
    if (result.found) {
      if (round > 0) take_back(input, base, result);
      break;
    }
    if (!raise_needs(choice)) break;
  }
  if (result.found) finish(input, result);
  std::swap(option_candidate_, first_option_candidate_);
  close(input, base, first_problem_, result);
  return result;
}

void PlanSearch::take_back(const GateInput& input, const Plan& base, SearchResult& result) {
  std::vector<std::pair<int64_t, int>> given_up;  // negative cost: most expensive first
  for (int u = 0; u < static_cast<int>(base.residency.size()); ++u) {
    if (result.plan.residency[u] == base.residency[u]) continue;
    const bool drains_now = result.plan.eager_drain || lifetimes_.retired(u, *input.state);
    given_up.emplace_back(-unit_cost_ns(context_, predictor_.loads(), u, result.plan.residency[u],
                                        drains_now, result.plan.prefetch),
                          u);
  }
  std::sort(given_up.begin(), given_up.end());
  if (given_up.size() > kMaxTakeBacks) given_up.resize(kMaxTakeBacks);
  for (const auto& [cost, unit] : given_up) {
    const ResidencyId old = result.plan.residency[unit];
    result.plan.residency[unit] = base.residency[unit];
    const Prediction prediction = predictor_.predict(input, result.plan);
    if (predictor_.fits(prediction)) {
      result.prediction = prediction;
    } else {
      result.plan.residency[unit] = old;
    }
  }
}

SearchResult PlanSearch::cheapest(const GateInput& input, const Plan& base,
                                  const SearchScope& scope) {
  SearchResult best;
  for (const Flags& flags : kFlags) {
    Plan start = base;
    start.eager_drain = flags.eager_drain;
    start.prefetch = flags.prefetch;
    const int64_t known = best.found ? best.cost_ns : std::numeric_limits<int64_t>::max();
    SearchResult result = try_flags(input, start, scope, known);
    if (result.found && (!best.found || result.cost_ns < best.cost_ns)) best = std::move(result);
  }
  return best;
}

SearchResult PlanSearch::last_resort(const GateInput& input, const Plan& base) {
  SearchResult result;
  result.plan = survival_;
  keep_past_choices(graph_, *input.state, result.plan);
  result.prediction = predictor_.predict(input, result.plan);
  result.found = predictor_.fits(result.prediction);
  if (result.found) {
    Plan start = base;
    start.eager_drain = true;
    start.prefetch = false;
    take_back(input, start, result);
  }
  finish(input, result);
  return result;
}

}  // namespace bagualu
