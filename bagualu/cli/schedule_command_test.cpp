#include "bagualu/cli/schedule_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "bagualu/base/json.h"
#include "bagualu/cli/test_command.h"

namespace bagualu {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class ScheduleCommand : public CommandTest {
 protected:
  static Outcome schedule(std::vector<std::string> flags) {
    flags.insert(flags.begin(), "schedule");
    return run_line(flags);
  }
  static std::string content(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
};

TEST_F(ScheduleCommand, DrawsAndCounts) {
  const Outcome at =
      schedule({"--pp", "2", "--micro-batches", "2", "--times", "10,20", "--columns", "18"});
  EXPECT_EQ(at.code, 0) << at.err;
  // (2 + 2 - 1) * 30 = 90; each rank works 60.
  EXPECT_THAT(at.out, StartsWith("0 F0F1....B0--..B1--\n1 ..F0B0--F1B1--....\n"));
  EXPECT_THAT(at.out, AllOf(HasSubstr("   0          2         30   33.3%"),
                            HasSubstr("   1          1         30   33.3%"),
                            HasSubstr("1f1b: 90 ns a step")));
}

TEST_F(ScheduleCommand, JsonHasTheFiguresOfEveryRank) {
  const Outcome at =
      schedule({"--order", "zb-v", "--pp", "4", "--micro-batches", "8", "--json", "-"});
  ASSERT_EQ(at.code, 0) << at.err;
  const Json json = Json::parse(at.out);
  EXPECT_EQ(json["longest_span_ns"], 48);  // no bubble: 8 micro-batches, 2 stages, 3 passes
  EXPECT_EQ(json["makespan_ns"], 51);
  ASSERT_EQ(json["ranks"].size(), 4U);
  for (const Json& rank : json["ranks"]) {
    EXPECT_EQ(rank["in_flight"], 8);
    EXPECT_EQ(rank["passes"].size(), 48U);
  }
  EXPECT_EQ(json["ranks"][0]["passes"][0], Json::parse(R"(["0F0",0,1])"));
}

// F = 10, B = 20, a slot 24, on one rank: 10 + 24 + 20.
TEST_F(ScheduleCommand, OverlapDrawsSlots) {
  const Outcome at = schedule({"--overlap", "--pp", "1", "--micro-batches", "2", "--times", "10,20",
                               "--slot", "80", "--columns", "27"});
  EXPECT_EQ(at.code, 0) << at.err;
  EXPECT_THAT(at.out, StartsWith("0 F0---F1B0--------B1--------\n"));
  EXPECT_THAT(at.out, AllOf(HasSubstr("a forward and a backward that run as one"),
                            HasSubstr("1f1b: 54 ns a step")));
  const Outcome json = schedule({"--overlap", "--pp", "1", "--micro-batches", "2", "--json", "-"});
  EXPECT_EQ(Json::parse(json.out)["ranks"][0]["passes"][1][3], "slot");
}

TEST_F(ScheduleCommand, OverlapTextReadsBackAndShapesAreChecked) {
  const Outcome text = schedule({"--overlap", "--order", "dualpipe-v", "--pp", "2", "--text"});
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr("[0F"));
  EXPECT_EQ(schedule({"--read", write("slots.txt", text.out), "--text"}).out, text.out);
  EXPECT_EQ(schedule({"--overlap", "--order", "v-half"}).code, 2);
  EXPECT_EQ(schedule({"--overlap", "--fit"}).code, 2);
  EXPECT_EQ(schedule({"--order", "interleaved", "--micro-batches", "7"}).code, 2);
  EXPECT_EQ(
      schedule({"--overlap", "--order", "interleaved", "--pp", "4", "--micro-batches", "7"}).code,
      0);
}

TEST_F(ScheduleCommand, TextReadsBack) {
  const Outcome text = schedule({"--order", "dualpipe", "--pp", "4", "--text"});
  ASSERT_EQ(text.code, 0) << text.err;
  const std::string file = write("order.txt", text.out);
  EXPECT_EQ(schedule({"--read", file, "--text"}).out, text.out);
  const Outcome drawn = schedule({"--read", file});
  EXPECT_THAT(drawn.out, HasSubstr(": 25 ns a step"));
}

TEST_F(ScheduleCommand, WritesSvgAndJsonFiles) {
  const Outcome at = schedule({"--svg", path("a.svg"), "--json", path("a.json")});
  EXPECT_EQ(at.code, 0) << at.err;
  EXPECT_THAT(content(path("a.svg")), StartsWith("<svg "));
  EXPECT_EQ(Json::parse(content(path("a.json")))["order"], "1f1b");
}

TEST_F(ScheduleCommand, StageTimesReplaceTimes) {
  const std::string file = write("times.txt", "10,20\n30,20,10\n");
  const Outcome at = schedule(
      {"--pp", "2", "--micro-batches", "1", "--stage-times", file, "--send", "5", "--json", "-"});
  ASSERT_EQ(at.code, 0) << at.err;
  // 10 + 5 + 30 + 30 + 5 + 20
  EXPECT_EQ(Json::parse(at.out)["makespan_ns"], 100);
}

TEST_F(ScheduleCommand, FitFindsAShorterStep) {
  const std::string file = write("times.txt", "10,3,2\n4,4,9\n4,4,9\n10,3,2\n5,5,5\n9,1,1\n");
  const auto step = [&](std::vector<std::string> more) {
    std::vector<std::string> flags = {"--order",         "zb-v", "--pp",          "3",
                                      "--micro-batches", "6",    "--stage-times", file,
                                      "--json",          "-"};
    flags.insert(flags.end(), more.begin(), more.end());
    return Json::parse(schedule(flags).out)["makespan_ns"].get<int64_t>();
  };
  EXPECT_LT(step({"--fit"}), step({}));
}

TEST_F(ScheduleCommand, RefusesInOneLineThatNamesTheFlag) {
  const auto refused = [](std::vector<std::string> flags, const char* what) {
    const Outcome at = schedule(std::move(flags));
    EXPECT_EQ(at.code, 2);
    EXPECT_EQ(at.out, "");
    EXPECT_THAT(at.err, AllOf(StartsWith("bagualu schedule"), HasSubstr(what)));
    EXPECT_EQ(std::count(at.err.begin(), at.err.end(), '\n'), 1) << at.err;
  };
  refused({"--order", "gpipe"}, "--order: found gpipe; allowed 1f1b,");
  refused({"--pp", "0"}, "--pp");
  refused({"--order", "dualpipe", "--pp", "3"}, "pp: found 3; allowed an even number");
  refused({"--order", "interleaved", "--pp", "4", "--micro-batches", "6"},
          "micro_batches: found 6; allowed a multiple of pp");
  refused({"--times", "10"}, "--times");
  refused({"--times", "10,-2"}, "--times");
  refused({"--times", "1,2,3,4"}, "--times");
  refused({"--send", "x"}, "--send");
  refused({"--pp", "60000", "--micro-batches", "60000"}, "--micro-batches: found 60000");
  refused({"--nonsense"}, "flags");
  refused({"--read", ""}, "--read: found nothing");
  refused({"--json", ""}, "--json: found nothing");
}

TEST_F(ScheduleCommand, RefusesFilesThatDoNotFit) {
  const auto refused = [](std::vector<std::string> flags, const std::string& what) {
    const Outcome at = schedule(std::move(flags));
    EXPECT_EQ(at.code, 2);
    EXPECT_EQ(at.out, "");
    EXPECT_THAT(at.err, HasSubstr(what));
  };
  refused({"--read", path("none")}, "none: file");
  refused({"--read", folder_.string()}, "file");
  refused({"--read", write("bad", "0F0 0Z0\n")}, "bad: line 1, token 2: found 0Z0");
  refused({"--read", write("stuck", "0B0 0F0\n")}, "0B0 waits for 0F0");
  refused({"--read", write("huge", "1000000F1000000\n")}, "at most");
  refused({"--pp", "2", "--stage-times", write("short", "1,2\n")}, "short: lines: found 1");
  refused({"--pp", "2", "--stage-times", write("long", "1,2\n1,2\n1,2\n")}, "long: line 3");
  refused({"--pp", "2", "--stage-times", write("odd", "1,2\n1;2\n")}, "odd: line 2");
}

}  // namespace
}  // namespace bagualu
