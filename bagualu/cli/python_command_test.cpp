#include "bagualu/cli/python_command.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace bagualu {
namespace {

namespace fs = std::filesystem;

class PythonCommand : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) /
              testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(folder_);
    fs::create_directories(folder_ / "bin");
  }
  void TearDown() override { fs::remove_all(folder_); }

  /// A stand-in for an interpreter: a shell script.
  fs::path make_program(const fs::path& file, const std::string& script) const {
    const fs::path path = folder_ / file;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << "#!/bin/sh\n" << script;
    fs::permissions(path, fs::perms::owner_all);
    return path;
  }

  SourceTree tree(const fs::path& root = {}) const { return {folder_ / "bin" / "bagualu", root}; }

  fs::path folder_;
};

TEST_F(PythonCommand, TakesThePythonBesideTheProgramFirst) {
  const fs::path built_with = make_program("venv/python3", "");
  EXPECT_EQ(python_invocation(tree(), built_with, "bagualu.launch", {}).python, built_with);
  const fs::path beside = make_program("bin/python3", "");
  EXPECT_EQ(python_invocation(tree(), built_with, "bagualu.launch", {}).python, beside);
}

TEST_F(PythonCommand, PassesAllArgumentsThroughUnchanged) {
  const fs::path python = make_program("bin/python3", "");
  const PythonInvocation invocation = python_invocation(
      tree(folder_), "", "bagualu.launch", {"train", "--nproc", "4", "", "a b", "--help"});
  EXPECT_EQ(invocation.arguments,
            (std::vector<std::string>{python.string(), "-m", "bagualu.launch", "train", "--nproc",
                                      "4", "", "a b", "--help"}));
  EXPECT_EQ(invocation.python_path, folder_ / "python");
  EXPECT_EQ(python_invocation(tree(), "", "bagualu.launch", {}).python_path, "")
      << "an installed package";
}

TEST_F(PythonCommand, SaysWhereItLookedForPython) {
  try {
    python_invocation(tree(), folder_ / "venv" / "python3", "bagualu.launch", {});
    FAIL() << "did not throw";
  } catch (const std::runtime_error& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find((folder_ / "bin" / "python3").string()), std::string::npos) << what;
    EXPECT_NE(what.find((folder_ / "venv" / "python3").string()), std::string::npos) << what;
    EXPECT_NE(what.find("make build"), std::string::npos) << what;
  }
}

using PythonCommandDeathTest = PythonCommand;

TEST_F(PythonCommandDeathTest, ReplacesTheProcessAndItsExitCode) {
  make_program("bin/python3", "echo \"$PYTHONPATH $*\" >&2; exit 3\n");
  const PythonInvocation invocation =
      python_invocation(tree("/tree"), "", "bagualu.report", {"run.jsonl"});
  EXPECT_EXIT(exec_python(invocation), testing::ExitedWithCode(3),
              "/tree/python.* -m bagualu.report run.jsonl");
  EXPECT_EXIT(
      {
        setenv("PYTHONPATH", "/mine", 1);
        exec_python(invocation);
      },
      testing::ExitedWithCode(3), "/tree/python:/mine -m bagualu.report run.jsonl");
}

TEST_F(PythonCommandDeathTest, SaysWhenItCannotStart) {
  PythonInvocation invocation;
  invocation.python = folder_ / "none";
  invocation.arguments = {"none"};
  EXPECT_THROW(exec_python(invocation), std::runtime_error);
}

}  // namespace
}  // namespace bagualu
