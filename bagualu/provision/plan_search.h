#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/provision/cover_search.h"
#include "bagualu/provision/policy.h"
#include "bagualu/provision/predictor.h"
#include "bagualu/provision/unit_lifetimes.h"

namespace bagualu {

/// Which choices a search may make.
struct SearchScope {
  bool recompute = true;       ///< false: offloads only (full-recompute has dropped the rest)
  bool survival_only = false;  ///< only what the survival plan would do to a unit
};

struct SearchResult {
  bool found = false;
  Plan plan;
  int64_t cost_ns = 0;  ///< exposed time over save-all
  Prediction prediction;
};

/// Finds the plan of least exposed time that fits the budgets, starting from a plan that does not.
///
/// The saving of each option is an interval of points; the cheapest cover of the points that are
/// over the budget is searched (cover_search.h) and the plan found is replayed exactly. Where the
/// replay shows more bytes than the intervals did, the difference is added to the need and the
/// search repeats. At most kExactUnits undecided units that matter: closed by branch and bound with
/// exact replays, so the result is the optimum.
class PlanSearch {
 public:
  static constexpr int kExactUnits = 12;

  PlanSearch(const ProvisionContext& context, Predictor& predictor);

  /// Requires: predictor.set_loads() has seen input.loads; `base` keeps the past choices.
  SearchResult cheapest(const GateInput& input, const Plan& base, const SearchScope& scope);

  /// The survival plan with the past kept, then taken back where the budget allows, most expensive
  /// first. Used where cheapest() finds nothing.
  SearchResult last_resort(const GateInput& input, const Plan& base);

 private:
  SearchResult try_flags(const GateInput& input, const Plan& base, const SearchScope& scope,
                         int64_t known_cost_ns);
  void collect_options(const GateInput& input, const Plan& base, const SearchScope& scope);
  bool allowed(int unit, ResidencyId residency, const SearchScope& scope) const;
  void build_problem(int first_point);
  bool raise_needs(const CoverChoice& choice);
  Plan apply(const Plan& base, const CoverChoice& choice) const;
  void close(const GateInput& input, const Plan& base, const CoverProblem& problem,
             SearchResult& result);
  void take_back(const GateInput& input, const Plan& base, SearchResult& result);
  void finish(const GateInput& input, SearchResult& result) const;

  struct Candidate {
    int unit = -1;
    ResidencyId residency = kSave;
    int64_t cost_ns = 0;
    int64_t host_bytes = 0;
    int first_segment = 0;
    int end_segment = 0;
  };

  const ProvisionContext& context_;
  const Graph& graph_;
  Predictor& predictor_;
  UnitLifetimes lifetimes_;
  CoverSearch search_;
  Plan survival_;

  std::vector<Candidate> candidates_;    ///< unit by unit
  std::vector<CoverSegment> segments_;   ///< of candidates_, in points
  std::vector<int64_t> high_;            ///< by point: base profile, raised by what replays showed
  std::vector<int64_t> exact_;           ///< by point: last replay
  std::vector<uint8_t> is_break_;        ///< by point
  std::vector<int> constraints_before_;  ///< by point
  CoverProblem problem_;
  CoverProblem first_problem_;
  std::vector<int> option_candidate_;  ///< by option of problem_
  std::vector<int> first_option_candidate_;
};

}  // namespace bagualu
