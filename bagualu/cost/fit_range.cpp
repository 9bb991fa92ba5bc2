#include "bagualu/cost/fit_range.h"

#include <cmath>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr FitRange kRanges[] = {
    {"gemm_efficiency_fraction", 0.05, 1},
    {"grouped_gemm_efficiency_fraction", 0.05, 1},
    {"attention_forward_efficiency_fraction", 0.05, 1},
    {"attention_backward_efficiency_fraction", 0.05, 1},
    {"memory_efficiency_fraction", 0.05, 1},
    {"collective_efficiency_fraction", 0.05, 1},
    {"comm_overlap_fraction", 0.05, 1},
    {"copy_hidden_fraction", 0.05, 1},
    {"launch_ns", 100, 1e6},
    {"collective_latency_ns", 100, 1e7},
    {"step_overhead_ns", 1e4, 1e10},
};

}  // namespace

const FitRange& fit_range(const std::string& key) {
  std::string allowed;
  for (const FitRange& range : kRanges) {
    if (key == range.key) return range;
    allowed += (allowed.empty() ? "" : ", ") + std::string(range.key);
  }
  throw InvalidInput("--fit", "number", key, allowed);
}

double system_value(const SystemSpec& system, const std::string& key) {
  return to_json(system).at(key).get<double>();
}

void set_system_value(Json& system, const std::string& key, double value) {
  if (key.ends_with("_ns")) {
    system[key] = static_cast<int64_t>(std::llround(value));
  } else {
    system[key] = std::round(value * 1e4) / 1e4;
  }
}

}  // namespace bagualu
