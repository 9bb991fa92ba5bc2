#include "bagualu/base/event_log.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

std::string content(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(EventLog, WritesOneLinePerEventAtOnce) {
  const auto path = std::filesystem::path(testing::TempDir()) / "event_log_test.jsonl";
  {
    EventLog log(path, EventLog::Open::kTruncate);
    log.write({{"type", "run"}, {"version", 1}});
    EXPECT_EQ(content(path), "{\"type\":\"run\",\"version\":1}\n") << "before the log is closed";
    log.write({{"type", "step"}, {"text", "a\nb"}});
  }
  EventLog(path, EventLog::Open::kAppend).write({{"type", "end"}});
  EXPECT_EQ(content(path),
            "{\"type\":\"run\",\"version\":1}\n{\"type\":\"step\",\"text\":\"a\\nb\"}\n"
            "{\"type\":\"end\"}\n");
  EventLog(path, EventLog::Open::kTruncate).write({{"type", "run"}});
  EXPECT_EQ(content(path), "{\"type\":\"run\"}\n");
  std::filesystem::remove(path);
}

TEST(EventLog, RefusesAMissingFolder) {
  const auto path = std::filesystem::path(testing::TempDir()) / "none" / "log.jsonl";
  EXPECT_THROW(EventLog(path, EventLog::Open::kTruncate), InvalidInput);
}

TEST(EventLog, SaysWhenTheDiskIsFull) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full on this system";
  EventLog log("/dev/full", EventLog::Open::kAppend);
  EXPECT_THROW(log.write({{"type", "run"}}), InvalidInput);
}

TEST(EventLog, TakesObjectsOnly) {
  const auto path = std::filesystem::path(testing::TempDir()) / "event_log_objects.jsonl";
  EventLog log(path, EventLog::Open::kTruncate);
  EXPECT_THROW(log.write(Json(3)), InternalError);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace bagualu
