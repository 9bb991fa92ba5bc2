#include "bagualu/cli/calibrate_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "bagualu/base/error.h"
#include "bagualu/cost/system.h"

namespace bagualu {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

const std::string kData = BAGUALU_SOURCE_DIR "/tests/data/";
const std::string kRows = kData + "korthikanti_table4.json";

class Calibrate : public testing::Test {
 protected:
  Calibrate()
      : folder_(fs::temp_directory_path() /
                testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::create_directories(folder_);
    tree_.root = BAGUALU_SOURCE_DIR;
  }
  ~Calibrate() override { fs::remove_all(folder_); }

  std::string run(std::vector<std::string> arguments) {
    std::ostringstream out, err;
    EXPECT_EQ(run_calibrate(arguments, tree_, {out, err}), kExitDone);
    return out.str();
  }
  std::string write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name) << text;
    return (folder_ / name).string();
  }

  fs::path folder_;
  SourceTree tree_;
};

TEST_F(Calibrate, PrintsErrorsWithAndWithoutTheFitAndWritesTheSystem) {
  const std::string out = (folder_ / "fitted.json").string();
  const std::string system = kData + "systems/a100-selene.json";
  const std::string table = run({"--system", system, "--measured", kRows, "--out", out});
  EXPECT_THAT(table, HasSubstr("fitted    gemm_efficiency_fraction"));
  EXPECT_THAT(table, HasSubstr("without the fit"));
  EXPECT_EQ(system_from_file(out).provenance, "fitted");
  EXPECT_EQ(table, run({"--system", system, "--measured", kRows}));  // the same every time
}

TEST_F(Calibrate, ComparesASnapshotBucketByBucket) {
  const std::string snapshot = write("s.json", R"({"format": "bagualu.memory_snapshot",
      "version": 1, "ranks": [{"rank": 0, "static_bytes": 70000000000, "peak_bytes": 90000000000}]})");
  const std::string table =
      run({"--snapshot", snapshot, "--measured", kRows, "--row", "22B/full_recompute"});
  EXPECT_THAT(table, HasSubstr("static"));
  EXPECT_THAT(table, HasSubstr("activations"));
  const Json json = parse_json_object(run({"--snapshot", snapshot, "--measured", kRows, "--row",
                                           "22B/full_recompute", "--json", "-"}),
                                      "json");
  EXPECT_EQ(json["buckets"].size(), 3u);
}

// A scenario of one's own names models and machines as `bagualu simulate` reads them.
TEST_F(Calibrate, FitsFiguresOfAScenarioOutsideTheConfigs) {
  Json scenario = read_json_file(fs::path(BAGUALU_SOURCE_DIR) / "configs" / "scenarios" /
                                 "mixtral-8x22b-128-h100.json");
  scenario.erase("name");
  const std::string mine = write("mine.json", scenario.dump());
  const std::vector<std::string> flags = {
      "--system",     "h100", "--scenario", mine,
      "--iterations", "1",    "--fit",      "gemm_efficiency_fraction"};
  std::vector<std::string> reached = flags, beyond = flags;
  reached.insert(reached.end(), {"--mfu", "full-recompute=0.25"});
  EXPECT_THAT(run(reached), HasSubstr("25.00 %"));
  // What no machine gives is an answer, and no fitted machine.
  const std::string out = (folder_ / "fitted.json").string();
  beyond.insert(beyond.end(), {"--mfu", "full-recompute=0.99", "--out", out});
  std::ostringstream table, err;
  EXPECT_EQ(run_calibrate(beyond, tree_, {table, err}), kExitInfeasible);
  EXPECT_THAT(table.str(), HasSubstr("no numbers within their bounds"));
  EXPECT_FALSE(fs::exists(out));
}

TEST_F(Calibrate, NamesTheFlagThatIsMissingOrWrong) {
  const auto complaint = [&](std::vector<std::string> arguments) -> std::string {
    try {
      run(std::move(arguments));
    } catch (const InvalidInput& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(complaint({}), HasSubstr("--system"));
  EXPECT_THAT(complaint({"--system", "h100"}), HasSubstr("--measured"));
  EXPECT_THAT(complaint({"--system", "h100", "--measured", kRows, "--fit", "speed"}),
              HasSubstr("gemm_efficiency_fraction"));
  EXPECT_THAT(complaint({"--system", "h100", "--scenario", "mixtral-8x22b-128-h100", "--mfu",
                         "static=0.3,static=0.4"}),
              HasSubstr("\"static\" twice"));
  EXPECT_THAT(complaint({"--snapshot", "s.json", "--measured", kRows, "--row", "9"}),
              HasSubstr("22B/baseline"));
}

}  // namespace
}  // namespace bagualu
