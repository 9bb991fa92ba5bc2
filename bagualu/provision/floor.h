#pragma once

#include "bagualu/provision/policy.h"

namespace bagualu {

/// The survival plan: every unit that can be rebuilt is dropped, every other one is offloaded and
/// drained at once, nothing is prefetched.
Plan survival_plan(const Graph& graph);

struct Floor {
  int64_t activation_bytes = 0;  ///< peak of the survival plan with every layer at the worst case
  int64_t host_bytes = 0;        ///< host bytes that plan needs
  std::string at;                ///< action at the peak
};

/// Source: docs/design.md, "The floor": any state reachable at a gate can be demoted to the survival
/// plan's state there, so a budget of at least the floor is never exceeded by any routing.
Floor compute_floor(const Graph& graph, const LayerLoad& worst_case);

}  // namespace bagualu
