#include "bagualu/cli/simulate_command.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/cli/test_command.h"
#include "bagualu/cli/test_page.h"
#include "bagualu/cli/test_simulation.h"

namespace bagualu {
namespace {

namespace fs = std::filesystem;

constexpr const char* kScenario = "mixtral-8x22b-128-h100";

class SimulateCommand : public CommandTest {
 protected:
  static Outcome simulate(const std::vector<std::string>& flags,
                          const Simulator& simulator = fake_simulator()) {
    std::ostringstream out;
    std::ostringstream err;
    const SourceTree tree{fs::path(BAGUALU_SOURCE_DIR) / "build/bin/bagualu", BAGUALU_SOURCE_DIR};
    Outcome outcome;
    try {
      outcome.code = run_simulate(flags, tree, simulator, {out, err});
    } catch (const InvalidInput& error) {
      outcome.code = kExitBadInput;
      err << error.what() << '\n';
    }
    outcome.out = out.str();
    outcome.err = err.str();
    return outcome;
  }
  std::string read(const std::string& name) const {
    std::ifstream file(folder_ / name);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
};

TEST_F(SimulateCommand, PrintsATableOfThePoliciesAskedFor) {
  const Outcome outcome = simulate({"--scenario", kScenario, "--policy", "static,adaptive"});
  EXPECT_EQ(outcome.code, kExitDone) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  for (const char* words : {"SIMULATED, not measured, on 128 devices of h100", "\nstatic ",
                            "\nadaptive ", "tp=", "budget"}) {
    EXPECT_NE(outcome.out.find(words), std::string::npos) << words << "\n" << outcome.out;
  }
  EXPECT_EQ(outcome.out.find("full-recompute"), std::string::npos);
}

TEST_F(SimulateCommand, WritesJsonPageAndChromeTrace) {
  const Outcome outcome =
      simulate({"--scenario", kScenario, "--policy", "static,adaptive", "--iterations", "50",
                "--json", path("a.json"), "--html", path("a.html"), "--perfetto",
                path("a.trace.json"), "--perfetto-ranks", "0,5", "--trace-iteration", "3"});
  EXPECT_EQ(outcome.code, kExitDone) << outcome.err;
  const Json json = read_json_file(path("a.json"));
  EXPECT_EQ(json.at("scenarios")[0].at("iterations"), 50);
  EXPECT_EQ(json.at("scenarios")[0].at("runs").size(), 2U);
  EXPECT_EQ(fault_of(read("a.html")), "");
  EXPECT_NE(read("a.trace.json").find("adaptive, rank 5 (stage 0), iteration 3, simulated"),
            std::string::npos);
}

TEST_F(SimulateCommand, SeedAndRoutingReplaceTheScenarios) {
  const std::string shape = write("shape.json", R"({"kind": "paper", "largest": 3.5})");
  std::vector<RoutingShape> seen;
  Simulator simulator = fake_simulator();
  simulator.run = [&](const Scenario& scenario, const SimPolicy& policy,
                      const SimOptions& options) {
    seen.push_back(scenario.routing);
    return fake_run(scenario, policy, options);
  };
  const std::vector<std::string> base = {"--scenario", kScenario, "--policy",
                                         "static",     "--seed",  "42"};
  for (const std::string& routing : {std::string("hot-rank"), shape}) {
    std::vector<std::string> flags = base;
    flags.insert(flags.end(), {"--routing", routing});
    EXPECT_EQ(simulate(flags, simulator).code, kExitDone);
  }
  ASSERT_EQ(seen.size(), 2U);
  EXPECT_EQ(seen[0].kind, "hot-rank");
  EXPECT_EQ(seen[0].seed, 42U);
  EXPECT_DOUBLE_EQ(seen[1].largest, 3.5);
  EXPECT_EQ(seen[1].seed, 42U);
}

TEST_F(SimulateCommand, APolicyThatCannotRunIsExitCodeThreeWithTheMissingBytes) {
  Simulator simulator = fake_simulator();
  simulator.run = [](const Scenario& scenario, SimPolicy policy, const SimOptions& options) {
    policy.label = "hopeless";
    return fake_run(scenario, policy, options);
  };
  const Outcome outcome = simulate({"--scenario", kScenario, "--policy", "adaptive"}, simulator);
  EXPECT_EQ(outcome.code, kExitInfeasible);
  EXPECT_NE(outcome.err.find("under its floor by 3.0 GiB (3221225472 bytes)"), std::string::npos)
      << outcome.err;
  EXPECT_NE(outcome.out.find("hopeless: cannot run"), std::string::npos);
}

TEST_F(SimulateCommand, ASignalLeavesWhatIsDoneMarkedIncomplete) {
  Simulator simulator = fake_simulator();
  simulator.run = [](const Scenario& scenario, const SimPolicy& policy, SimOptions options) {
    const auto progress = options.progress;
    options.progress = [&](int64_t done, int64_t total) {
      if (policy.label == "adaptive" && done == 7) std::raise(SIGINT);
      return progress(done, total);
    };
    return fake_run(scenario, policy, options);
  };
  const Outcome outcome = simulate(
      {"--scenario", kScenario, "--policy", "static,adaptive,kwai", "--json", path("a.json")},
      simulator);
  EXPECT_EQ(outcome.code, 128 + SIGINT);
  const Json json = read_json_file(path("a.json"));
  EXPECT_EQ(json.at("complete"), false);
  const Json& runs = json.at("scenarios")[0].at("runs");
  ASSERT_EQ(runs.size(), 2U) << "kwai was not begun";
  EXPECT_EQ(runs[0].at("complete"), true);
  EXPECT_EQ(runs[1].at("complete"), false);
  EXPECT_EQ(runs[1].at("iterations"), 7);
  EXPECT_NE(outcome.out.find("INCOMPLETE, stopped after 7 of"), std::string::npos) << outcome.out;
}

TEST_F(SimulateCommand, ListNamesEveryScenario) {
  const Outcome outcome = simulate({"--list"});
  EXPECT_EQ(outcome.code, kExitDone);
  for (const auto& entry :
       fs::directory_iterator(fs::path(BAGUALU_SOURCE_DIR) / "configs/scenarios")) {
    EXPECT_NE(outcome.out.find(entry.path().stem().string()), std::string::npos) << entry.path();
  }
}

TEST_F(SimulateCommand, BadInputIsOneLineAndWritesNothing) {
  const std::string broken = write("broken.json", "{");
  const std::string page = path("page.html");
  const std::vector<std::vector<std::string>> lines = {
      {},
      {"--scenario", "bw1000"},
      {"--scenario", broken},
      {"--scenario", std::string(kScenario) + "," + kScenario},
      {"--scenario", kScenario, "--policy", "adaptve"},
      {"--scenario", kScenario, "--policy", "static,static"},
      {"--scenario", kScenario, "--policy", "static,"},
      {"--scenario", kScenario, "--iterations", "0"},
      {"--scenario", kScenario, "--iterations", "many"},
      {"--scenario", kScenario, "--threads", "0"},
      {"--scenario", kScenario, "--seed", "-1"},
      {"--scenario", kScenario, "--routing", "papre"},
      {"--scenario", kScenario, "--routing", broken},
      {"--scenario", kScenario, "--perfetto", "-"},
      {"--scenario", kScenario, "--perfetto-ranks", "0"},
      {"--scenario", kScenario, "--perfetto", path("t.json"), "--perfetto-ranks", "128"},
      {"--scenario", kScenario, "--perfetto", path("t.json"), "--perfetto-ranks", "1,1"},
      {"--scenario", kScenario, "--perfetto", path("t.json"), "--iterations", "2",
       "--trace-iteration", "2"},
      {"--scenario", kScenario, "--json", page},
      {"--scenario", kScenario, "--json", path("")},
      {"--scenario", kScenario, "--perfetto", "/proc/t.json"},
      {"--scenario", kScenario, "--json", path("absent/folder.json")},
      {"--scenario", kScenario, "--nonsense"}};
  for (std::vector<std::string> flags : lines) {
    flags.insert(flags.end(), {"--html", page});
    const Outcome outcome = simulate(flags);
    EXPECT_EQ(outcome.code, kExitBadInput) << outcome.out;
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_FALSE(fs::exists(page)) << outcome.err;
  }
  const Outcome typo = simulate({"--scenario", kScenario, "--policy", "adaptve"});
  EXPECT_NE(typo.err.find("nearest is \"adaptive\""), std::string::npos) << typo.err;
}

// The scenario's "selective" recomputes nothing, so it is the policy save-all under another name.
TEST_F(SimulateCommand, APolicyIsCalledWhatItWasAskedFor) {
  const Outcome outcome = simulate({"--scenario", "mixtral-8x22b-128-h100", "--policy",
                                    "save-all,selective", "--iterations", "1", "--json", "-"});
  ASSERT_EQ(outcome.code, kExitDone) << outcome.err;
  const Json runs = Json::parse(outcome.out).at("scenarios")[0].at("runs");
  EXPECT_EQ(runs[0].at("label"), "save-all");
  EXPECT_EQ(runs[1].at("label"), "selective");
}

TEST_F(SimulateCommand, TellsWhatOfATraceIsLeftOut) {
  std::string log;
  for (int layer = 0; layer < 64; ++layer) {
    for (int rank = 0; rank < 64; ++rank) {
      log += fmt::format("step: 0, layer: {}, rank: {}, received_tokens: {}\n", layer, rank,
                         rank == 0 ? 9 : 5);
    }
  }
  const auto table = [&](const std::string& text) {
    const Outcome outcome = simulate({"--scenario", kScenario, "--policy", "adaptive",
                                      "--iterations", "1", "--routing", write("run.log", text)});
    EXPECT_EQ(outcome.code, kExitDone) << outcome.err;
    return outcome.out;
  };
  EXPECT_EQ(table(log).find("left out"), std::string::npos);
  EXPECT_NE(table(log + "step: 1, layer: 0, ra\n").find("1 records or lines of it left out"),
            std::string::npos)
      << table(log + "step: 1, layer: 0, ra\n");
}

TEST_F(SimulateCommand, ATraceWithFewerRanksThanTheJobIsRefused) {
  const std::string log = write("run.log",
                                "step: 0, layer: 0, rank: 0, received_tokens: 5\n"
                                "step: 0, layer: 0, rank: 1, received_tokens: 5\n");
  const Outcome outcome = simulate({"--scenario", kScenario, "--routing", log});
  EXPECT_EQ(outcome.code, kExitBadInput);
  EXPECT_NE(outcome.err.find("run.log"), std::string::npos) << outcome.err;
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
}

}  // namespace
}  // namespace bagualu
