// The choices that a graph leaves, and what they cost: found by code from reads, creates and
// producers, so that a new operator or residency needs no line here. Start here for the question
// "what can be given up?"; pool.h answers "what should be?".
//
// Glossary
//   retained     saved or offloaded: which of the two is decided at the end (pool.h, packing)
//   closure      the operators that have to run again to rebuild a unit: its producer, and the
//                producers of those inputs that were not kept for backward
//   component    units whose closures share an operator, so that their prices do not add up
//   option       one choice for every unit of a component
// Invariants
//   An operator runs again at most once per micro-batch (schedule/timeline.h), so inside a
//   component the price of an option is the sum over the union of its closures, and components add
//   up.
#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/cost/op_cost.h"
#include "bagualu/graph/graph.h"

namespace bagualu {

/// What an option holds and costs at one load.
struct OptionValue {
  int64_t retained_bytes = 0;  ///< may go over the link
  int64_t fixed_bytes = 0;     ///< encoded copies: stay on the device
  int64_t compute_ns = 0;      ///< closures, encoding and decoding

  int64_t bytes() const { return retained_bytes + fixed_bytes; }
};

struct FrontierOption {
  std::vector<ResidencyId> choice;  ///< by unit of the component; kSave stands for retained
  std::vector<int> closure;         ///< operators that run again, ascending
};

struct FrontierComponent {
  int layer = -1;
  bool scales = false;                  ///< bytes or time depend on the layer's routed load
  std::vector<int> units;               ///< ascending
  std::vector<FrontierOption> options;  ///< the first one retains everything
  int64_t combinations = 0;             ///< that were looked at
  int64_t redundant = 0;  ///< of these, left out: another one is never worse at any load
};

/// Throws: InternalError if a component has more than kMaxCombinations combinations.
class Frontier {
 public:
  static constexpr int64_t kMaxCombinations = 1 << 16;

  Frontier(const Graph& graph, const CostTable& cost, bool allow_quantise);

  const Graph& graph() const { return graph_; }
  const std::vector<FrontierComponent>& components() const { return components_; }
  /// Units that are always resident.
  const std::vector<int>& pinned() const { return pinned_; }

  /// Least that the unit holds on the device if it is neither dropped nor offloaded.
  int64_t least_kept_bytes(int unit, const LayerLoad& load) const;
  /// Price and bytes of an option of `component` at its layer's load.
  OptionValue value(const FrontierComponent& component, const FrontierOption& option,
                    const LayerLoad& load) const;
  /// Operators that would run again if `unit` were dropped, ascending; empty for kInPieces, whose
  /// price is its own.
  const std::vector<int>& closure(int unit) const { return closures_[static_cast<size_t>(unit)]; }

 private:
  void find_closures();
  void find_components();
  void list_options(FrontierComponent& component);
  bool never_worse(const FrontierComponent& component, const FrontierOption& a,
                   const FrontierOption& b) const;
  bool allowed(int unit, const ResidencySpec& choice) const;
  int64_t encoded_bytes(int unit, const ResidencySpec& choice, const LayerLoad& load) const;
  int64_t own_ns(int unit, ResidencyId residency, const LayerLoad& load) const;

  const Graph& graph_;
  const CostTable& cost_;
  const bool allow_quantise_;
  std::vector<std::vector<int>> closures_;  ///< by unit
  std::vector<FrontierComponent> components_;
  std::vector<int> pinned_;
};

}  // namespace bagualu
