#include "bagualu/cli/command_line.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

namespace bagualu {
namespace {

struct Outcome {
  int code = 0;
  std::string out;
  std::string err;
};

Outcome run_line(const std::vector<std::string>& arguments) {
  std::ostringstream out;
  std::ostringstream err;
  const int code = run(arguments, {out, err});
  return {code, out.str(), err.str()};
}

TEST(CommandLine, PrintsItsVersion) {
  const Outcome outcome = run_line({"--version"});
  EXPECT_EQ(outcome.code, kExitDone);
  EXPECT_EQ(outcome.out, "bagualu " BAGUALU_VERSION "\n");
  EXPECT_EQ(outcome.err, "");
}

TEST(CommandLine, HelpNamesEveryCommandAndTheExitCodes) {
  for (const char* flag : {"--help", "-h", "help"}) {
    const Outcome outcome = run_line({flag});
    EXPECT_EQ(outcome.code, kExitDone);
    for (const char* word : {"plan", "trace", "schedule", "simulate", "calibrate", "train",
                             "profile", "report", "generate", "Exit codes"}) {
      EXPECT_NE(outcome.out.find(word), std::string::npos) << word;
    }
  }
}

TEST(CommandLine, EveryCommandOfThisProcessHasHelpWithDefaults) {
  for (const char* command : {"plan", "trace", "schedule", "simulate", "calibrate"}) {
    const Outcome outcome = run_line({command, "--help"});
    EXPECT_EQ(outcome.code, kExitDone) << command;
    EXPECT_EQ(outcome.err, "") << command;
    for (const char* word : {"--help", "--json", "["}) {
      EXPECT_NE(outcome.out.find(word), std::string::npos) << command << ": " << word;
    }
  }
}

TEST(CommandLine, RefusesUnknownCommandsInOneLine) {
  const std::vector<std::vector<std::string>> lines = {{}, {"trian"}, {"--nproc", "4"}, {""}};
  for (const auto& line : lines) {
    const Outcome outcome = run_line(line);
    EXPECT_EQ(outcome.code, kExitBadInput);
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_EQ(outcome.err.rfind("bagualu", 0), 0u) << outcome.err;
  }
}

TEST(CommandLine, NamesTheCommandOfAComplaint) {
  const Outcome outcome = run_line({"plan", "--model", "no-such-model"});
  EXPECT_EQ(outcome.code, kExitBadInput);
  EXPECT_EQ(outcome.err.rfind("bagualu plan: --model: found \"no-such-model\"", 0), 0u)
      << outcome.err;
}

}  // namespace
}  // namespace bagualu
