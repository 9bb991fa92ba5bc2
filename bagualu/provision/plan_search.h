#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/provision/cover_search.h"
#include "bagualu/provision/policy.h"
#include "bagualu/provision/pool_solver.h"
#include "bagualu/provision/predictor.h"
#include "bagualu/provision/search_options.h"

namespace bagualu {

struct SearchResult {
  bool found = false;
  Plan plan;
  std::vector<Plan> resting_plans;  ///< by input.resting; empty: unchanged
  int64_t cost_ns = 0;              ///< exposed time over save-all
  int64_t bound_ns = 0;             ///< certified: no plan in the scope exposes less
  Prediction prediction;
};

/// What a mitigation may cost above the optimum: 1 % of it, or 0.05 ms, but never more than 1/2000
/// of the micro-batch's own time. Graphs of at most PlanSearch::kExactUnits open units: nothing.
PoolTolerance search_tolerance(const ProvisionContext& context);

/// Finds the plan of least exposed time that fits the budgets, starting from a plan that does not.
///
/// The saving of each option is an interval of points. First the point that misses most bytes is
/// covered alone (pool.h), which also gives the bound; the plan is replayed exactly, and where the
/// replay misses bytes, the difference is added to the need and the next point is covered. If that
/// ends within the tolerance, it is done. Else all points are covered together (cover_search.h).
/// At most kExactUnits undecided units that matter: closed by branch and bound with exact replays,
/// so the result is the optimum.
class PlanSearch {
 public:
  static constexpr int kExactUnits = 12;

  PlanSearch(const ProvisionContext& context, Predictor& predictor);

  /// Requires: predictor.set_loads() has seen input.loads; `base` keeps the past choices.
  /// `incumbent`: a plan that keeps them as well and stays if it fits and is good enough.
  SearchResult cheapest(const GateInput& input, const Plan& base, const SearchScope& scope,
                        const Plan* incumbent = nullptr);

  /// The same gate once the resting micro-batches have given up what `result` takes from them.
  GateInput after_demotion(const GateInput& input, const SearchResult& result) const;

  /// The survival plan with the past kept, for the resting micro-batches as well.
  SearchResult survival(const GateInput& input);

  /// The same, then taken back where the budget allows, most expensive first. Used where cheapest()
  /// finds nothing.
  SearchResult last_resort(const GateInput& input, const Plan& base);

 private:
  struct Flags {
    bool eager_drain;
    bool prefetch;
  };

  void prepare(const GateInput& input, const Plan& base, const SearchScope& scope,
               bool same_profile);
  bool replay_chosen(const GateInput& input, const Plan& base, const std::vector<int>& chosen,
                     bool raised, SearchResult& result);
  SearchResult cover_one_point(const GateInput& input, const Plan& base);
  SearchResult cover_all_points(const GateInput& input, const Plan& base, SearchResult known);
  int64_t accepted_gap(int64_t cost_ns) const;
  bool good_enough(const SearchResult& result) const;
  int hardest_point(const std::vector<int64_t>& high, int first_point) const;
  void build_pool(int point, bool wide);
  void build_problem(int first_point);
  bool raise_needs(const std::vector<int>& chosen);
  void apply(const GateInput& input, const Plan& base, const std::vector<int>& chosen,
             SearchResult& result) const;
  std::vector<int> chosen_options(const CoverChoice& choice) const;
  void close(const GateInput& input, const Plan& base, const CoverProblem& problem,
             SearchResult& result);
  void take_back(const GateInput& input, const Plan& base, SearchResult& result);
  void take_back_resting(const GateInput& input, SearchResult& result);
  void price(const GateInput& input, SearchResult& result) const;

  const ProvisionContext& context_;
  const Graph& graph_;
  Predictor& predictor_;
  const PoolTolerance tolerance_;
  SearchOptions options_;
  CoverSearch cover_;
  PoolSolver pool_solver_;
  PoolRelaxation relaxation_;

  std::vector<int64_t> first_high_;  ///< by point: replay of the base
  std::vector<int64_t> high_;        ///< by point: base, raised by what replays showed
  std::vector<int64_t> exact_;       ///< by point: last replay
  int64_t past_ns_ = 0;              ///< price of what is decided already
  int open_units_ = 0;
  int64_t wide_bound_ns_ = -1;  ///< no plan of any flags exposes less; -1: not known
  PoolProblem pool_;
  PoolSolution pool_solution_;
  std::vector<int> pool_option_;         ///< by option of pool_: index in options_, -1 = none
  std::vector<uint8_t> is_break_;        ///< by point
  std::vector<int> constraints_before_;  ///< by point
  CoverProblem problem_;
  CoverProblem first_problem_;
  std::vector<int> cover_option_;  ///< by option of problem_: index in options_
  std::vector<int> first_cover_option_;
};

}  // namespace bagualu
