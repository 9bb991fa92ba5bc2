#include "bagualu/cli/trace_command.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cli/test_command.h"
#include "bagualu/model/routing_source.h"

namespace bagualu {
namespace {

namespace fs = std::filesystem;

class TraceCommand : public CommandTest {
 protected:
  static Outcome trace(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "trace");
    return run_line(arguments);
  }
  /// Twenty iterations of layer 1 on two ranks: the first at 2.0, five at 1.3, the others at 1.0;
  /// one torn line.
  std::string log() const {
    std::string text;
    for (int step = 0; step < 20; ++step) {
      const int hot = step == 0 ? 135 : step <= 5 ? 65 : 50;
      text += "step: " + std::to_string(step) +
              ", layer: 1, rank: 0, received_tokens: " + std::to_string(hot) + "\n";
      text += "step: " + std::to_string(step) +
              ", layer: 1, rank: 1, received_tokens: " + std::to_string(std::max(0, 100 - hot)) +
              "\n";
    }
    return write("run.log", text + "step: 20, layer: 1, ran\n");
  }
};

TEST_F(TraceCommand, PrintsTheDistributionAndWhatWasLeftOut) {
  const Outcome outcome = trace({log()});
  EXPECT_EQ(outcome.code, kExitDone) << outcome.err;
  for (const char* words :
       {"40 records from 40 of 41 lines: 20 iterations", "layer 1", "rank 0", "autocorrelation",
        "torn records or lines", "run.log:41", "Layers count from 1"}) {
    EXPECT_NE(outcome.out.find(words), std::string::npos) << words << "\n" << outcome.out;
  }
}

TEST_F(TraceCommand, JsonHasTheSharesByIteration) {
  const Outcome outcome = trace({log(), "--json", "-"});
  ASSERT_EQ(outcome.code, kExitDone) << outcome.err;
  const Json answer = parse_json_object(outcome.out, "output");
  // Step 0: 135 of 135 rows on one of two ranks: 2.0. Five at 65 / 50 = 1.3. The rest 1.0.
  const Json& imbalance = answer.at("imbalance");
  EXPECT_EQ(imbalance.at("count"), 20);
  EXPECT_DOUBLE_EQ(imbalance.at("largest"), 2.0);
  EXPECT_DOUBLE_EQ(imbalance.at("above_fraction").at("1.2"), 0.3);
  EXPECT_DOUBLE_EQ(imbalance.at("above_fraction").at("2.0"), 0.0);
  EXPECT_EQ(answer.at("left_out").at("torn").at("count"), 1);
  EXPECT_EQ(answer.at("series").size(), 20U);
  EXPECT_EQ(answer.at("counts"), "rank");
}

TEST_F(TraceCommand, WritesATraceThatGivesTheSameStatistics) {
  const std::string output = (folder_ / "trace.jsonl").string();
  const Outcome first = trace({log(), "-o", output, "--json", "-"});
  ASSERT_EQ(first.code, kExitDone) << first.err;
  const Outcome second = trace({output, "--json", "-"});
  ASSERT_EQ(second.code, kExitDone) << second.err;
  const Json a = parse_json_object(first.out, "first");
  const Json b = parse_json_object(second.out, "second");
  for (const char* key : {"imbalance", "series", "layers", "ranks", "first_layer"}) {
    EXPECT_EQ(a.at(key), b.at(key)) << key;
  }
}

TEST_F(TraceCommand, FitIsAShapeThatMakesTheLogsIterations) {
  const std::string shape = path("shape.json");
  const Outcome outcome = trace({log(), "--fit", shape});
  ASSERT_EQ(outcome.code, kExitDone) << outcome.err;
  EXPECT_NE(outcome.out.find("20 iterations"), std::string::npos) << "the table as without it";
  const RoutingShape fitted = routing_shape_from_json(read_json_file(shape), shape);
  EXPECT_EQ(fitted.kind, "fitted");
  // As in the test above: fourteen at 1.0, five at 1.3, one at 2.0.
  ASSERT_EQ(fitted.quantiles.size(), 20U);
  EXPECT_DOUBLE_EQ(fitted.quantiles[13], 1.0);
  EXPECT_DOUBLE_EQ(fitted.quantiles[14], 1.3);
  EXPECT_DOUBLE_EQ(fitted.quantiles[19], 2.0);
  EXPECT_DOUBLE_EQ(fitted.calm_fraction, 0.7);
}

TEST_F(TraceCommand, FitOfCountsPerExpertNeedsTheirRanks) {
  const std::string csv = write("trace.csv", "a,0,0,0,40 20 30 10\na,1,0,0,25 25 25 25\n");
  const std::string shape = path("shape.json");
  const Outcome refused = trace({csv, "--fit", shape});
  EXPECT_EQ(refused.code, kExitBadInput);
  EXPECT_NE(refused.err.find("a divisor of 4"), std::string::npos) << refused.err;
  EXPECT_FALSE(fs::exists(shape));
  ASSERT_EQ(trace({csv, "--fit", shape, "--ep", "2"}).code, kExitDone);
  EXPECT_EQ(routing_shape_from_json(read_json_file(shape), shape).quantiles,
            (std::vector<double>{1.0, 1.2}))
      << "60 of 50 rows at most";
}

TEST_F(TraceCommand, FoldsExpertsOntoRanks) {
  const std::string csv = write("trace.csv", "a,0,0,0,40 20 30 10\na,1,0,0,25 25 25 25\n");
  const Json experts = parse_json_object(trace({csv, "--json", "-"}).out, "output");
  EXPECT_DOUBLE_EQ(experts.at("imbalance").at("largest"), 1.6) << "40 of 25";
  EXPECT_EQ(experts.at("counts"), "expert");
  const std::string output = (folder_ / "trace.jsonl").string();
  const Json ranks =
      parse_json_object(trace({csv, "--ep", "2", "-o", output, "--json", "-"}).out, "output");
  EXPECT_DOUBLE_EQ(ranks.at("imbalance").at("largest"), 1.2) << "60 of 50";
  std::ifstream file(output);
  std::string line;
  std::getline(file, line);
  EXPECT_EQ(line, R"({"step": 0, "micro_batch": 0, "layer": 0, "counts": [40, 20, 30, 10]})");
}

TEST_F(TraceCommand, NamesRanksAndLayersWithoutALine) {
  const std::string log = write("run.log",
                                "step: 0, layer: 2, rank: 0, received_tokens: 5\n"
                                "step: 0, layer: 2, rank: 3, received_tokens: 5\n"
                                "step: 0, layer: 2, rank: 4, received_tokens: 5\n");
  const Outcome outcome = trace({log, "--layers", "4", "--ep", "2"});
  EXPECT_NE(outcome.out.find("1-2"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("1, 3-4"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("3 ranks, no multiple of --ep 2"), std::string::npos) << outcome.out;
}

TEST_F(TraceCommand, BadInputIsOneLineAndWritesNothing) {
  const std::string good = log();
  const std::string bad = write("bad.log", "nothing of interest\n");
  const std::string output = (folder_ / "out.jsonl").string();
  const std::vector<std::vector<std::string>> lines = {
      {},
      {"absent.log"},
      {bad},
      {good, bad},
      {good, good},
      {good, "--layers", "0"},
      {good, "--ep", "x"},
      {good, "-o", "-"},
      {good, "-o", good},
      {good, "--fit", "-"},
      {good, "--fit", good},
      {good, "--fit", path("s"), "--balanced-rows", "50"},
      {good, "--nonsense"}};
  for (std::vector<std::string> arguments : lines) {
    if (std::find(arguments.begin(), arguments.end(), "-o") == arguments.end()) {
      arguments.insert(arguments.end(), {"-o", output});
    }
    const Outcome outcome = trace(arguments);
    EXPECT_EQ(outcome.code, kExitBadInput);
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_FALSE(fs::exists(output)) << outcome.err;
  }
  const std::string csv = write("trace.csv", "a,0,0,0,40 20 30 10\n");
  EXPECT_EQ(trace({csv, "--ep", "3"}).code, kExitBadInput);
  EXPECT_EQ(trace({good, "--layers", "1"}).code, kExitDone);
}

TEST_F(TraceCommand, LayersBeyondTheModelAreRefused) {
  const std::string log = write("run.log", "step: 0, layer: 9, rank: 0, received_tokens: 5\n");
  const Outcome outcome = trace({log, "--layers", "8"});
  EXPECT_EQ(outcome.code, kExitBadInput);
  EXPECT_NE(outcome.err.find("at least 9: the log has layer 9, counted from 1"), std::string::npos)
      << outcome.err;
}

TEST(NumberRanges, JoinsNeighbours) {
  EXPECT_EQ(number_ranges({0, 1, 2, 5, 7, 8}), "0-2, 5, 7-8");
  EXPECT_EQ(number_ranges({0, 2, 4, 6}, 2), "0, 2 and 2 more");
  EXPECT_EQ(number_ranges({}), "");
}

}  // namespace
}  // namespace bagualu
