// `bagualu plan --explain`: which combinations of residencies the planner looked at, and which of
// them it left out because another one is never worse (provision/frontier.h).
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cost/op_cost.h"
#include "bagualu/graph/graph.h"
#include "bagualu/provision/frontier.h"

namespace bagualu {

/// Unit names by residency, without their layer; units that are not named are kept: saved, or
/// offloaded where the link has room.
struct ExplainedChoice {
  struct Part {
    std::string residency;
    std::vector<std::string> units;
  };
  std::vector<Part> parts;
};

struct RemovedCombination {
  ExplainedChoice choice;
  ExplainedChoice instead;  ///< holds no more and costs no more, at any load
  int64_t bytes_less = 0;   ///< that `instead` holds, at the balanced load
  int64_t ns_less = 0;      ///< that `instead` costs, at the balanced load
};

/// Units whose prices do not add up, or a single unit.
struct ExplainedComponent {
  int layer = -1;  ///< -1: embedding, final norm, head
  std::vector<std::string> units;
  std::vector<std::string> coupled_by;  ///< operators that rebuild more than one of the units
  int64_t combinations = 0;             ///< that were looked at
  std::vector<RemovedCombination> removed;
};

struct ExplainedLayer {
  int layer = -1;
  int64_t units = 0;       ///< without the pinned ones
  int64_t pinned = 0;      ///< always resident
  double naive_log10 = 0;  ///< of the product of the units' residencies
  int64_t components = 0;
  int64_t combinations = 0;
  int64_t redundant = 0;
};

struct PlanExplanation {
  ExplainedLayer total;                ///< layer has no meaning
  std::vector<ExplainedLayer> layers;  ///< -1 first
  std::vector<ExplainedComponent> components;
};

/// Explains the frontier of `graph` without encodings, which `bagualu plan` never chooses.
PlanExplanation explain_plan(const Graph& graph, const CostTable& cost, const LayerLoad& balanced);

Json to_json(const PlanExplanation& explanation);
void print_explanation(const PlanExplanation& explanation, std::ostream& out);

}  // namespace bagualu
