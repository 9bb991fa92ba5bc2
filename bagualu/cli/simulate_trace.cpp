#include "bagualu/cli/simulate_trace.h"

#include <algorithm>

#include "bagualu/base/error.h"

namespace bagualu {

std::string_view TracedRank::name_of(const SimTraceEvent& event) const {
  if (event.name < 0) return "";
  BGL_CHECK(static_cast<size_t>(event.name) < program->names.size(), event.name, rank);
  return program->names[static_cast<size_t>(event.name)];
}

int64_t spike_of(const SimRun& run) {
  const auto spike = std::max_element(
      run.series.begin(), run.series.end(),
      [](const SimIteration& a, const SimIteration& b) { return a.imbalance < b.imbalance; });
  return spike == run.series.end() ? -1 : spike->iteration;
}

}  // namespace bagualu
