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
  /// Resting micro-batches that hold no more than this are left alone: they do not pay for the load
  /// of another.
  int64_t spared_rest_bytes = 0;
};

/// A unit that may still be given up, and how. Resting micro-batches are only brought nearer to the
/// survival plan, so that they never block its way (docs/design.md, "The floor").
struct SearchOption {
  int microbatch = -1;  ///< index in GateInput::resting, -1: the one that stands at the gate
  int unit = -1;
  ResidencyId residency = kSave;
  int64_t cost_ns = 0;
  int64_t host_bytes = 0;
  int64_t freed_bytes = 0;  ///< resting only: returned at once
  int first_segment = 0;    ///< in SearchOptions::segments
  int end_segment = 0;
};

/// The open choices at a gate with what each saves, point by point (predictor.h), and costs.
class SearchOptions {
 public:
  explicit SearchOptions(const ProvisionContext& context);

  /// `base` says what is decided already and has the flags.
  void collect(const GateInput& input, const Plan& base, const SearchScope& scope,
               const Predictor& predictor);

  const std::vector<SearchOption>& list() const { return options_; }  ///< unit by unit
  const std::vector<CoverSegment>& segments() const { return segments_; }
  int64_t saving_at(const SearchOption& option, int point) const;
  bool same_unit(const SearchOption& a, const SearchOption& b) const {
    return a.unit == b.unit && a.microbatch == b.microbatch;
  }

  const UnitLifetimes& lifetimes() const { return lifetimes_; }
  const Plan& survival() const { return survival_; }

 private:
  bool allowed(int unit, ResidencyId residency, const SearchScope& scope) const;
  void collect_resting(const GateInput& input, int index);

  const ProvisionContext& context_;
  const Graph& graph_;
  UnitLifetimes lifetimes_;
  Plan survival_;
  std::vector<SearchOption> options_;
  std::vector<CoverSegment> segments_;
};

}  // namespace bagualu
