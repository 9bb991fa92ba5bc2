#include "bagualu/base/atomic_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

namespace fs = std::filesystem;

std::string content(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class WriteFileAtomic : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) /
              testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  size_t files() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), {}));
  }

  fs::path folder_;
};

TEST_F(WriteFileAtomic, WritesAndReplaces) {
  const fs::path path = folder_ / "a.bin";
  const std::string bytes("with\0zero", 9);
  write_file_atomic(path, bytes);
  EXPECT_EQ(content(path), bytes);
  write_file_atomic(path, "");
  EXPECT_EQ(content(path), "");
  EXPECT_EQ(files(), 1u) << "no temporary file may stay";
}

TEST_F(WriteFileAtomic, FollowsALink) {
  write_file_atomic(folder_ / "a.bin", "old");
  fs::create_symlink("a.bin", folder_ / "link");
  write_file_atomic(folder_ / "link", "new");
  EXPECT_TRUE(fs::is_symlink(folder_ / "link"));
  EXPECT_EQ(content(folder_ / "a.bin"), "new");
}

// Through links of our own: a mistake here must not replace a device of the machine.
TEST_F(WriteFileAtomic, WritesToADeviceAndDoesNotReplaceIt) {
  fs::create_symlink("/dev/null", folder_ / "null");
  fs::create_symlink("/dev/full", folder_ / "full");
  write_file_atomic(folder_ / "null", "x");
  EXPECT_TRUE(fs::is_character_file(folder_ / "null"));
  EXPECT_THROW(write_file_atomic(folder_ / "full", "x"), InvalidInput);
  EXPECT_TRUE(fs::is_character_file(folder_ / "full"));
}

TEST_F(WriteFileAtomic, RefusesAMissingFolder) {
  EXPECT_THROW(write_file_atomic(folder_ / "none" / "a.bin", "x"), InvalidInput);
}

TEST_F(WriteFileAtomic, TellsBeforehandWhatCannotBeWrittenAndLeavesNothing) {
  write_file_atomic(folder_ / "a.bin", "old");
  fs::create_symlink("/dev/null", folder_ / "null");
  check_writable(folder_ / "a.bin");
  check_writable(folder_ / "new.bin");
  check_writable(folder_ / "null");
  EXPECT_EQ(content(folder_ / "a.bin"), "old");
  EXPECT_EQ(files(), 2u);
  EXPECT_THROW(check_writable(folder_), InvalidInput);
  EXPECT_THROW(check_writable(folder_ / "none" / "a.bin"), InvalidInput);
  EXPECT_THROW(check_writable("/proc/a.bin"), InvalidInput);
}

TEST_F(WriteFileAtomic, KeepsTheOldStateWhenTheRenameFails) {
  fs::create_directories(folder_ / "target" / "full");  // a file cannot replace a filled folder
  EXPECT_THROW(write_file_atomic(folder_ / "target", "x"), InvalidInput);
  EXPECT_TRUE(fs::is_directory(folder_ / "target" / "full"));
  EXPECT_EQ(files(), 1u) << "the temporary file must go";
}

// A file-size limit makes write(2) fail as a full disk does, without root and without a mount.
TEST_F(WriteFileAtomic, KeepsTheOldFileWhenThereIsNoRoom) {
  const fs::path path = folder_ / "a.bin";
  write_file_atomic(path, "old");
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4096, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_THROW(write_file_atomic(path, std::string(8192, 'x')), InvalidInput);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(content(path), "old");
  EXPECT_EQ(files(), 1u) << "the temporary file must go";
}

}  // namespace
}  // namespace bagualu
