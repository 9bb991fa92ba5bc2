#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cost/figure_fit.h"
#include "bagualu/sim/job_sim.h"

namespace bagualu {

/// simulate_job(), or a stand-in in tests.
using PolicySimulator = std::function<SimRun(const Scenario&, const SimPolicy&, const SimOptions&)>;

/// Published MFUs of policies on one scenario, and which numbers of a machine may be fitted to
/// them.
struct FigureRequest {
  Json system;  ///< in place of the scenario's own
  std::string where;
  Scenario scenario;
  std::vector<PublishedFigure> figures;  ///< by name of a policy: MFU of its iterations alone
  std::vector<std::string> keys;
  int64_t iterations = 0;  ///< of each simulation
};

/// "full-recompute=0.246,static=0.3"; MFUs in (0, 1).
/// Throws: InvalidInput(where, "--mfu").
std::vector<PublishedFigure> parse_figures(const std::string& text, const std::string& where);

/// Every policy has its published settings on the machine that is tried.
/// Throws: InvalidInput if a policy cannot run the scenario at all.
FigureFit fit_scenario_figures(const FigureRequest& request, const PolicySimulator& simulator);

void print_figures(const FigureRequest& request, const FigureFit& fit, std::ostream& out);
/// docs/formats.md, System (`fit`).
Json figures_json(const FigureRequest& request, const FigureFit& fit);

}  // namespace bagualu
