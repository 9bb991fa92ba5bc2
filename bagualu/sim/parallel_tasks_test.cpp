#include "bagualu/sim/parallel_tasks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

namespace bagualu {
namespace {

TEST(RunTasks, RunsEveryTaskOnceOnAWorkerThatExists) {
  for (const int threads : {1, 2, 5}) {
    std::vector<std::atomic<int>> runs(100);
    std::atomic<bool> known{true};
    run_tasks(threads, 100, [&](int worker, int64_t i) {
      if (worker < 0 || worker >= threads) known = false;
      ++runs[static_cast<size_t>(i)];
    });
    for (const auto& count : runs) EXPECT_EQ(count, 1);
    EXPECT_TRUE(known);
  }
}

TEST(RunTasks, WithoutTasksDoesNothing) {
  run_tasks(4, 0, [](int, int64_t) { FAIL(); });
}

TEST(RunTasks, ThrowsWhatTheFirstOfTheTasksThatThrowThrew) {
  for (const int threads : {1, 2, 5}) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      try {
        run_tasks(threads, 100, [](int, int64_t i) {
          if (i % 10 == 3) throw std::runtime_error(std::to_string(i));
        });
        FAIL() << "nothing thrown";
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "3");
      }
    }
  }
}

}  // namespace
}  // namespace bagualu
