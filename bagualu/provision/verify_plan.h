#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/schedule/timeline.h"

namespace bagualu {

struct VerifiedPlan {
  int64_t peak_bytes = 0;  ///< 0 if the plan breaks a rule that makes simulating it meaningless
  std::vector<std::string> violations;
  bool ok() const { return violations.empty(); }
};

/// Checks a plan that holds for a whole micro-batch against the rules of docs/design.md, and its
/// peak against the budget (0 = none).
///
/// Written apart from schedule/ on purpose: it shares no code with timeline.cpp and replay.cpp. It
/// keeps the set of resident storages and adds their bytes up anew at every step.
/// Cost: O(ops * storages); for tests, plan files and `bagualu plan`, not for decide().
VerifiedPlan verify_plan(const Graph& graph, const Plan& plan, const std::vector<LayerLoad>& loads,
                         int64_t budget_bytes);

}  // namespace bagualu
