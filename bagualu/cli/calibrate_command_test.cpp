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
  EXPECT_THAT(complaint({"--snapshot", "s.json", "--measured", kRows, "--row", "9"}),
              HasSubstr("22B/baseline"));
}

}  // namespace
}  // namespace bagualu
