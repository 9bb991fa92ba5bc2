// What `bagualu simulate` found, apart from flags and pictures.
//
// Invariants
//   All of it is simulated, and every text and file made from it says so.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cli/simulate_detail.h"
#include "bagualu/sim/job_sim.h"
#include "bagualu/sim/scenario.h"

namespace bagualu {

struct SimulatedPolicy {
  SimRun run;
  bool complete = true;             ///< false: stopped before all iterations were run
  std::vector<SpikeDetail> detail;  ///< one if pictures were asked for and there is an iteration
};

struct SimulatedScenario {
  Scenario scenario;
  int64_t iterations = 0;  ///< asked for
  std::vector<SimulatedPolicy> policies;
};

struct SimulateReport {
  bool complete = true;  ///< false: some iteration or policy asked for was not run
  std::vector<SimulatedScenario> scenarios;
};

/// Figures of a run beside those it holds.
struct PolicyFigures {
  double relative = 0;  ///< throughput over the first policy's; 0: unknown
  int64_t p50_ns = 0;   ///< of the iterations that did not die; 0: there is none
  int64_t p99_ns = 0;
  double lost_hours = 0;             ///< restarts and iterations done again or cut short
  int64_t most_mitigated_ranks = 0;  ///< in one iteration
  bool cannot_run = false;           ///< not one iteration can be completed
  int64_t missing_bytes = 0;         ///< then
};
PolicyFigures figures_of(const SimulatedScenario& scenario, size_t policy);

/// "paper (seed 7)", "trace run.jsonl".
std::string routing_text(const Scenario& scenario);
std::string system_text(const SystemSpec& system);

void print_table(const SimulateReport& report, std::ostream& out);
/// docs/formats.md, "Answer of bagualu simulate". Ensures: every number is finite.
Json to_json(const SimulateReport& report);

}  // namespace bagualu
