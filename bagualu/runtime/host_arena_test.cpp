#include "bagualu/runtime/host_arena.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "bagualu/base/units.h"

namespace bagualu {
namespace {

namespace fs = std::filesystem;

HostArena plenty(int64_t limit_bytes, int64_t keep_free_bytes = 1 * kGiB) {
  return HostArena({limit_bytes, keep_free_bytes, [] { return 1024 * kGiB; }});
}

HostBlock take(HostArena& arena, int64_t bytes) {
  auto block = arena.alloc(bytes);
  EXPECT_TRUE(block.ok());
  return std::move(block.value());
}

TEST(HostArena, CountsExactSizesNotPowersOfTwo) {
  // Below 64 KiB granules of 64, from there on pages of 4096.
  EXPECT_EQ(HostArena::charged_bytes(0), 0);
  EXPECT_EQ(HostArena::charged_bytes(33 * kKiB + 1), 33 * kKiB + 64);
  EXPECT_EQ(HostArena::charged_bytes(33 * kMiB + 1), 33 * kMiB + 4096);
  HostArena arena = plenty(0);
  const HostBlock block = take(arena, 33 * kMiB + 1);
  EXPECT_EQ(arena.live_bytes(), 33 * kMiB + 4096);
}

TEST(HostArena, AlignsBlocks) {
  HostArena arena = plenty(0);
  const HostBlock small = take(arena, 100);
  const HostBlock large = take(arena, 100 * kKiB);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(small.data()) % 64, 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(large.data()) % 4096, 0u);
  std::memset(small.data(), 1, 100);
  std::memset(large.data(), 1, 100 * kKiB);
}

TEST(HostArena, LimitRefusesWithoutThrowing) {
  HostArena arena = plenty(256);
  HostBlock block = take(arena, 192);
  const auto refused = arena.alloc(65);  // charged 128, left 64
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().reason, HostFull::Reason::kLimit);
  EXPECT_EQ(refused.error().wanted_bytes, 128);
  EXPECT_EQ(refused.error().left_bytes, 64);
  EXPECT_EQ(arena.live_bytes(), 192);
  EXPECT_TRUE(arena.alloc(64).ok());
  block.reset();
  EXPECT_TRUE(arena.alloc(256).ok());
}

TEST(HostArena, MachineWithoutRoomRefuses) {
  int64_t available = 1 * kMiB;
  HostArena arena({0, 0, [&] { return available; }});
  const auto refused = arena.alloc(2 * kMiB);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().reason, HostFull::Reason::kSystem);
  EXPECT_EQ(refused.error().left_bytes, 1 * kMiB);
  EXPECT_EQ(arena.live_bytes(), 0);
  available = 4 * kMiB;
  EXPECT_TRUE(arena.alloc(2 * kMiB).ok());
}

TEST(HostArena, AsksMachineAgainBeforeTakingMoreThanItSaid) {
  int asked = 0;
  HostArena arena({0, 0, [&] {
                     ++asked;
                     return 3 * kMiB;
                   }});
  const HostBlock first = take(arena, 2 * kMiB);
  EXPECT_EQ(asked, 1);
  const HostBlock second = take(arena, 1 * kMiB);
  EXPECT_EQ(asked, 1);
  const HostBlock third = take(arena, 1 * kMiB);
  EXPECT_EQ(asked, 2);
}

TEST(HostArena, ReusesFreedBlockOfExactSizeOnly) {
  HostArena arena = plenty(0);
  take(arena, 2 * kMiB).reset();
  arena.trim();
  HostBlock block = take(arena, 1 * kMiB);
  void* const address = block.data();
  block.reset();
  EXPECT_EQ(arena.live_bytes(), 0);
  EXPECT_EQ(arena.kept_bytes(), 1 * kMiB);
  const HostBlock smaller = take(arena, 512 * kKiB);
  EXPECT_EQ(arena.kept_bytes(), 1 * kMiB);
  const HostBlock same = take(arena, 1 * kMiB - 1);  // charged alike
  EXPECT_EQ(same.data(), address);
  EXPECT_EQ(arena.kept_bytes(), 0);
}

TEST(HostArena, KeepsAtMostTheHighWaterMark) {
  HostArena arena = plenty(0, 2 * kMiB);
  HostBlock a = take(arena, 1 * kMiB);
  HostBlock b = take(arena, 1 * kMiB + 4096);
  HostBlock c = take(arena, 1 * kMiB);
  a.reset();
  b.reset();  // a must go: 2 MiB + 4 KiB
  EXPECT_EQ(arena.kept_bytes(), 1 * kMiB + 4096);
  c.reset();  // and now b
  EXPECT_EQ(arena.kept_bytes(), 1 * kMiB);
  arena.trim();
  EXPECT_EQ(arena.kept_bytes(), 0);
}

// As offloaded rows do: no size comes twice, and never are more than two blocks live.
TEST(HostArena, BlocksOfEverNewSizesDoNotPileUp) {
  HostArena arena = plenty(0);
  for (int64_t i = 0; i < 100; ++i) {
    const HostBlock first = take(arena, 1 * kMiB + i * 4096);
    const HostBlock second = take(arena, 1 * kMiB + (200 + i) * 4096);
    EXPECT_EQ(arena.kept_bytes(), 0) << i;
  }
  EXPECT_LE(arena.kept_bytes(), 2 * kMiB + 398 * 4096);  // the last two together
}

TEST(HostArena, KeptBlocksNeverCauseARefusal) {
  HostArena arena = plenty(2 * kMiB);
  take(arena, 2 * kMiB).reset();
  EXPECT_EQ(arena.kept_bytes(), 2 * kMiB);
  const HostBlock block = take(arena, 1 * kMiB);  // another size: the kept one must go
  EXPECT_EQ(arena.live_bytes() + arena.kept_bytes(), 1 * kMiB);
}

TEST(HostArena, LowerLimitGivesKeptBlocksBack) {
  HostArena arena = plenty(0);
  take(arena, 2 * kMiB).reset();
  arena.set_limit(1 * kMiB);
  EXPECT_EQ(arena.kept_bytes(), 0);
  EXPECT_FALSE(arena.alloc(2 * kMiB).ok());
}

TEST(HostArena, ZeroBytesAreLegalAndCountNothing) {
  HostArena arena = plenty(64);
  const HostBlock full = take(arena, 64);
  const HostBlock none = take(arena, 0);
  EXPECT_EQ(none.data(), nullptr);
  EXPECT_EQ(arena.live_bytes(), 64);
}

TEST(HostArena, PeakSinceReset) {
  HostArena arena = plenty(0);
  HostBlock block = take(arena, 640);
  HostBlock other = take(arena, 64);
  block.reset();
  EXPECT_EQ(arena.peak_bytes(), 704);
  arena.reset_peak();
  EXPECT_EQ(arena.peak_bytes(), 64);
}

TEST(HostBlock, MovesAndMayOutliveItsArena) {
  HostBlock survivor;
  {
    HostArena arena = plenty(0);
    HostBlock block = take(arena, 128 * kKiB);
    survivor = std::move(block);
    EXPECT_EQ(block.data(), nullptr);  // NOLINT(bugprone-use-after-move)
  }
  std::memset(survivor.data(), 7, 128 * kKiB);
}

TEST(HostArena, ThreadsShareIt) {
  HostArena arena = plenty(64 * kMiB, 1 * kMiB);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&arena, t] {
      for (int i = 1; i < 500; ++i) {
        auto block = arena.alloc(i * 512 + t);
        ASSERT_TRUE(block.ok());
        std::memset(block.value().data(), t, static_cast<size_t>(block.value().size_bytes()));
      }
    });
  }
  for (auto& each : threads) {
    each.join();
  }
  EXPECT_EQ(arena.live_bytes(), 0);
  EXPECT_LE(arena.kept_bytes(), 1 * kMiB);
}

/// A small /proc and /sys below a temporary folder.
class AvailableHostBytes : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    root_ = fs::path(testing::TempDir()) / (std::string("bagualu_host_") + info->name());
    fs::remove_all(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  void write(const std::string& file, const std::string& text) {
    const fs::path path = root_ / file;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  fs::path root_;
};

TEST_F(AvailableHostBytes, UnknownIsUnlimited) {
  EXPECT_EQ(available_host_bytes(root_), std::numeric_limits<int64_t>::max());
}

TEST_F(AvailableHostBytes, ReadsMemAvailable) {
  write("proc/meminfo", "MemTotal: 900 kB\nMemFree: 1 kB\nMemAvailable: 300 kB\n");
  EXPECT_EQ(available_host_bytes(root_), 300 * kKiB);
}

TEST_F(AvailableHostBytes, V2TakesTheTightestGroupAndDiscountsPageCache) {
  write("proc/meminfo", "MemAvailable: 1000000 kB\n");
  write("proc/self/cgroup", "0::/a/b\n");
  write("sys/fs/cgroup/a/memory.max", "max\n");
  write("sys/fs/cgroup/a/memory.current", "900\n");
  write("sys/fs/cgroup/a/b/memory.max", "1000\n");
  write("sys/fs/cgroup/a/b/memory.current", "700\n");
  write("sys/fs/cgroup/a/b/memory.stat", "anon 600\ninactive_file 100\n");
  EXPECT_EQ(available_host_bytes(root_), 400);  // 1000 - (700 - 100)
  write("sys/fs/cgroup/a/memory.max", "950\n");
  EXPECT_EQ(available_host_bytes(root_), 50);  // the parent: 950 - 900
}

TEST_F(AvailableHostBytes, V2InsideAContainerReadsTheRoot) {
  write("proc/self/cgroup", "0::/not/visible/here\n");
  write("sys/fs/cgroup/memory.max", "5000\n");
  write("sys/fs/cgroup/memory.current", "6000\n");
  EXPECT_EQ(available_host_bytes(root_), 0);  // never negative
}

TEST_F(AvailableHostBytes, V1ReadsTheMemoryController) {
  write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/job\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", "2000\n");
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "3000\n");
  write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1000\n");
  EXPECT_EQ(available_host_bytes(root_), 2000);
}

}  // namespace
}  // namespace bagualu
