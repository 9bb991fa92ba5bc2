#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "bagualu/cli/command_line.h"

namespace bagualu {

/// What one command line gave back.
struct Outcome {
  int code = 0;
  std::string out;
  std::string err;
};

inline Outcome run_line(const std::vector<std::string>& arguments) {
  std::ostringstream out;
  std::ostringstream err;
  const int code = run(arguments, {out, err});
  return {code, out.str(), err.str()};
}

/// Base of tests of subcommands: an empty folder of the test's own, removed afterwards.
class CommandTest : public testing::Test {
 protected:
  void SetUp() override {
    const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::path(testing::TempDir()) /
              (std::string(test.test_suite_name()) + "." + test.name());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
    return path(name);
  }
  static std::string config(const std::string& kind, const std::string& name) {
    return std::string(BAGUALU_SOURCE_DIR) + "/configs/" + kind + "/" + name + ".json";
  }

  std::filesystem::path folder_;
};

}  // namespace bagualu
