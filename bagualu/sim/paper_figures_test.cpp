// The two figures of the paper that its machine is fitted to (docs/evaluation.md, section 3) come
// out of the simulation. A change of the simulator that moves them needs a new fit.
#include <gtest/gtest.h>

#include <string>

#include "bagualu/cost/system.h"
#include "bagualu/sim/job_sim.h"
#include "bagualu/sim/scenario.h"

namespace bagualu {
namespace {

const std::string kConfigs = BAGUALU_SOURCE_DIR "/configs/";

double mfu(const char* policy, const char* system) {
  Scenario scenario = scenario_from_file(kConfigs + "scenarios/bw1000-128.json");
  scenario.system = system_from_file(kConfigs + "systems/" + system + ".json");
  SimOptions options;
  options.iterations = 8;
  return simulate_job(
             scenario,
             published_settings(policy, scenario.job, scenario.system, scenario.budget_bytes),
             options)
      .mfu_calm_fraction;
}

TEST(PaperFigures, TheFittedMachineGivesTheMfuOfFullRecomputeAndOfAStaticPlan) {
  EXPECT_NEAR(mfu("full-recompute", "dcu-bw1000-fitted"), 0.246, 0.02 * 0.246);
  EXPECT_NEAR(mfu("static", "dcu-bw1000-fitted"), 0.300, 0.02 * 0.300);
}

TEST(PaperFigures, TheFitChangesTwoNumbersAndNothingElse) {
  Json given = read_json_file(kConfigs + "systems/dcu-bw1000.json");
  Json fitted = read_json_file(kConfigs + "systems/dcu-bw1000-fitted.json");
  EXPECT_EQ(fitted.at("provenance"), "fitted");
  EXPECT_EQ(fitted.at("fit").at("numbers").size(), 2u);
  EXPECT_EQ(fitted.at("fit").at("figures").size(), 2u);
  for (const char* key : {"name", "provenance", "fit", "gemm_efficiency_fraction",
                          "collective_efficiency_fraction"}) {
    given.erase(key);
    fitted.erase(key);
  }
  EXPECT_EQ(given, fitted);
}

}  // namespace
}  // namespace bagualu
