#include "bagualu/cli/source_tree.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

namespace fs = std::filesystem;

class SourceTreeTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) /
            testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(root_);
    fs::create_directories(root_ / "build" / "bin");
  }
  void TearDown() override { fs::remove_all(root_); }

  void touch(const fs::path& file) const {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << "{}";
  }

  fs::path root_;
};

TEST_F(SourceTreeTest, RecognisesABuildByThePythonPackageTwoFoldersUp) {
  EXPECT_TRUE(source_tree_of(root_ / "build" / "bin" / "bagualu").root.empty());
  touch("python/bagualu/__init__.py");
  EXPECT_EQ(source_tree_of(root_ / "build" / "bin" / "bagualu").root, root_);
}

TEST_F(SourceTreeTest, FindsConfigsOfTheTreeOrOfTheInstallation) {
  const SourceTree built{root_ / "build" / "bin" / "bagualu", root_};
  EXPECT_EQ(config_folders(built, "models").at(0), root_ / "configs" / "models");
  const fs::path package = "lib/python3.11/site-packages/bagualu";
  touch(package / "configs" / "models" / "tiny.json");
  const SourceTree installed{root_ / "bin" / "bagualu", {}};
  const std::vector<fs::path> expected = {root_ / package / "configs" / "models"};
  EXPECT_EQ(config_folders(installed, "models"), expected);
  EXPECT_TRUE(config_folders(installed, "systems").empty());
}

TEST_F(SourceTreeTest, ResolvesFilesBeforeNames) {
  touch("configs/models/tiny.json");
  touch("own.json");
  const std::vector<fs::path> folders = {root_ / "configs" / "models"};
  const auto resolve = [&](const std::string& text) {
    return resolve_config(text, folders, "test", "--model");
  };
  EXPECT_EQ(resolve("tiny"), root_ / "configs" / "models" / "tiny.json");
  EXPECT_EQ(resolve((root_ / "own.json").string()), root_ / "own.json");
  EXPECT_THROW(resolve(""), InvalidInput);
  EXPECT_THROW(resolve("../models/tiny"), InvalidInput);
  EXPECT_THROW(resolve(root_.string()), InvalidInput) << "a folder is no file";
  try {
    resolve("tinny");
    FAIL() << "did not throw";
  } catch (const InvalidInput& error) {
    EXPECT_NE(error.allowed().find("tiny"), std::string::npos) << error.what();
  }
}

TEST_F(SourceTreeTest, ResolvesThisMachineToTheMeasuredFile) {
  touch("configs/systems/h100.json");
  const SourceTree tree{root_ / "build" / "bin" / "bagualu", root_};
  const auto resolve = [&](const std::string& text, const fs::path& home) {
    return resolve_system(text, tree, home, "test", "--system");
  };
  EXPECT_EQ(resolve("h100", {}), root_ / "configs" / "systems" / "h100.json");
  try {
    resolve("this-machine", root_);
    FAIL() << "did not throw";
  } catch (const InvalidInput& error) {
    EXPECT_NE(error.allowed().find("bagualu profile"), std::string::npos) << error.what();
    EXPECT_NE(error.found().find(root_.string()), std::string::npos) << error.what();
  }
  touch(".cache/bagualu/this-machine.json");
  EXPECT_EQ(resolve("this-machine", root_), root_ / ".cache" / "bagualu" / "this-machine.json");
  EXPECT_THROW(resolve("this-machine", {}), InvalidInput);
}

TEST(FindSourceTree, NamesTheRunningProgram) {
  EXPECT_TRUE(fs::exists(find_source_tree().program));
}

}  // namespace
}  // namespace bagualu
