#include "bagualu/cli/simulate_report.h"

#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include "bagualu/cli/simulate_command.h"
#include "bagualu/cli/test_simulation.h"

namespace bagualu {
namespace {

SimulateReport report_of(const std::vector<Scenario>& scenarios) {
  SimulateRequest request;
  request.scenarios = scenarios;
  std::ostringstream progress;
  SimulateReport report = simulate(request, fake_simulator(), progress).report;
  EXPECT_EQ(progress.str(), "") << "progress is for terminals";
  return report;
}

std::string table_of(const SimulateReport& report) {
  std::ostringstream out;
  print_table(report, out);
  return out.str();
}

// Parameters: 4 layers of attention 4 * 64 * 64, 8 experts of 3 * 64 * 128, router 8 * 64, norms
// 2 * 64; embedding and head 1024 * 64 each; final norm 64: 985,664; per token 2 of 8 experts:
// 395,840.
// adaptive: 90 * 1 s + 10 * 1.2 s = 102 s for 100 M tokens: 980,392 tokens/s. static loses 284 s
// + 76 s = 0.10 h more: 462 s, 216,450 tokens/s, MFU 0.3 * 102 / 462 = 6.6 %. adaptive over
// static: 462 / 102 = 4.529. Peak 31 of 32 GiB: 97 %. 10 of 100 iterations are mitigated.
constexpr const char* kTable =
    R"(small: SIMULATED, not measured, on 8 devices of fast (datasheet)
  toy: 0.99 M parameters (0.40 M per token), 4 layers, 8 experts, top 2
  tp=1,cp=1,pp=2,vpp=1,ep=4,etp=1,dp=4; 1f1b, 1 x 512 tokens per micro-batch, 4 micro-batches per step
  100 iterations, budget 32.0 GiB, routing paper (seed 0)
  restart 284 s, checkpoint every 500 iterations (10 s), no other failures

policy        tokens/s  relative  MFU alone  with restarts    best  p50 iteration   peak / budget  OOMs    lost  mitigated  most ranks
static         216,450    1.000x     30.0 %          6.6 %  32.0 %      1000.0 ms  31.0 GiB, 97 %     1  0.10 h      0.0 %           0
adaptive       980,392    4.529x     30.0 %         30.0 %  32.0 %      1000.0 ms  31.0 GiB, 97 %     0  0.00 h     10.0 %           2
)";

TEST(SimulateReport, TableIsAsItWas) { EXPECT_EQ(table_of(report_of({fake_scenario()})), kTable); }

TEST(SimulateReport, SeveralScenariosAreComparedByScale) {
  Scenario large = fake_scenario("large");
  large.job.layout.world_size = 16;
  large.policies.erase(large.policies.begin());
  const std::string table = table_of(report_of({fake_scenario(), large}));
  EXPECT_NE(table.find("tokens/s, SIMULATED  small (8)  large (16)\n"
                       "static                 216,450           -\n"
                       "adaptive               980,392     980,392\n"),
            std::string::npos)
      << table;
}

TEST(SimulateReport, SaysWhichPolicyCannotRunAndWhatIsMissing) {
  Scenario scenario = fake_scenario();
  scenario.policies[1].label = "hopeless";
  const SimulateReport report = report_of({scenario});
  const std::string table = table_of(report);
  EXPECT_NE(table.find("hopeless: cannot run, 3.0 GiB under its floor"), std::string::npos)
      << table;
  const PolicyFigures figures = figures_of(report.scenarios[0], 1);
  EXPECT_TRUE(figures.cannot_run);
  EXPECT_EQ(figures.missing_bytes, 3 * kGiB);
  EXPECT_EQ(to_json(report)["scenarios"][0]["runs"][1]["relative"], nullptr);
}

TEST(SimulateReport, DiesInEveryTryMeansItCannotRunOnlyIfNothingWasCompleted) {
  SimulateReport report = report_of({fake_scenario()});
  SimRun& run = report.scenarios[0].policies[0].run;
  run.unable_iteration = 40;
  EXPECT_FALSE(figures_of(report.scenarios[0], 0).cannot_run);
  EXPECT_NE(table_of(report).find("static: gives up: out of memory in every try of iteration 40\n"),
            std::string::npos);
  run.unable_iteration = 0;
  run.iterations = 0;
  run.peak_bytes = 35 * kGiB;  // of 32
  EXPECT_TRUE(figures_of(report.scenarios[0], 0).cannot_run);
  EXPECT_EQ(figures_of(report.scenarios[0], 0).missing_bytes, 3 * kGiB);
}

TEST(SimulateReport, EveryNumberOfTheJsonIsFinite) {
  SimulateReport report = report_of({fake_scenario()});
  Json json = to_json(report);
  json["scenarios"][0]["runs"][0].erase("unable_iteration");  // null where there is none
  json["scenarios"][0]["runs"][1].erase("unable_iteration");
  EXPECT_EQ(not_finite_in(json), "");
  report.scenarios[0].policies[0].run.mfu_fraction = std::nan("");
  const std::string text = to_json(report).dump();
  EXPECT_EQ(to_json(report)["scenarios"][0]["runs"][0]["mfu_fraction"], nullptr);
  EXPECT_NE(not_finite_in(to_json(report)), "") << "the check can fail";
  EXPECT_EQ(parse_json_object(text, "answer").at("kind"), "simulated");
}

TEST(SimulateReport, StoppedRunsAreMarked) {
  SimulateReport report = report_of({fake_scenario()});
  report.complete = false;
  report.scenarios[0].policies[1].complete = false;
  report.scenarios[0].policies[1].run.iterations = 70;
  const std::string table = table_of(report);
  EXPECT_NE(table.find("adaptive: INCOMPLETE, stopped after 70 of 100 iterations"),
            std::string::npos);
  EXPECT_NE(table.find("\nINCOMPLETE: "), std::string::npos);
  EXPECT_EQ(to_json(report)["complete"], false);
  EXPECT_EQ(to_json(report)["scenarios"][0]["runs"][1]["complete"], false);
}

}  // namespace
}  // namespace bagualu
