#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/cli/command_line.h"
#include "bagualu/cli/simulate_report.h"
#include "bagualu/cli/source_tree.h"

namespace bagualu {

/// What was asked of `bagualu simulate`.
struct SimulateRequest {
  std::vector<Scenario> scenarios;  ///< with the policies, routing, seed asked for
  SimOptions options;
  std::vector<int64_t> perfetto_ranks;  ///< empty: the hottest
  int64_t trace_iteration = -1;         ///< -1: the most uneven of each run
  bool wants_page = false;
  bool wants_perfetto = false;
  bool live = false;  ///< progress is shown

  int64_t iterations_of(const Scenario& scenario) const {
    return options.iterations > 0 ? options.iterations : scenario.iterations;
  }
};

/// What was found, and the Chrome trace if it was asked for.
struct SimulateAnswer {
  SimulateReport report;
  std::string perfetto;
};

/// Runs every policy of every scenario, until a signal comes.
SimulateAnswer simulate(const SimulateRequest& request, const Simulator& simulator,
                        std::ostream& progress);

/// `bagualu simulate`: a job on a cluster, iteration by iteration, under several policies.
/// Returns: exit code: 3 if a policy cannot run at all, 128 + signal if one came.
/// Throws:  InvalidInput; then nothing was printed and no file written.
int run_simulate(const std::vector<std::string>& arguments, const SourceTree& tree,
                 const Simulator& simulator, const Streams& streams);

}  // namespace bagualu
