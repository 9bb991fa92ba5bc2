#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/schedule/timeline.h"

namespace bagualu {

struct VerifiedPlan {
  int64_t peak_bytes = 0;  ///< 0 if the plan breaks a rule that makes simulating it meaningless
  /// Taken off the device between forward and backward, drains included: bytes that no storage
  /// still holds, whatever a plan adds up to. Twins and copies that stay count as staying.
  int64_t freed_bytes = 0;
  std::vector<std::string> violations;
  bool ok() const { return violations.empty(); }
};

/// Checks a plan that holds for a whole micro-batch against the rules of docs/design.md, and its
/// peak against the budget (0 = none). The graph may be any: it need not have passed finalize(). A
/// claim of more freed bytes than `freed_bytes` is a violation (0 = no claim).
///
/// Written apart from schedule/ on purpose: it shares no code with timeline.cpp and replay.cpp. It
/// keeps the set of resident storages and adds their bytes up anew at every step.
/// Cost: O(ops * storages); for tests, plan files and `bagualu plan`, not for decide().
VerifiedPlan verify_plan(const Graph& graph, const Plan& plan, const std::vector<LayerLoad>& loads,
                         int64_t budget_bytes, int64_t claimed_bytes = 0);

}  // namespace bagualu
