#include "bagualu/cli/schedule_replay.h"

#include <gmock/gmock.h>

#include "bagualu/base/json.h"
#include "bagualu/cli/test_command.h"
#include "bagualu/schedule/step_trace.h"

namespace bagualu {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Two stages: rank 0 computes 10 and sends, the message takes until 15; rank 1, which starts 5
// later, has posted its receive, waits until 15 and computes until 35.
class ScheduleReplay : public CommandTest {
 protected:
  void write_traces(int steps = 1) const {
    StepTraceWriter first(path("run.trace-0.jsonl"));
    StepTraceWriter second(path("run.trace-1.jsonl"));
    for (int step = 0; step < steps; ++step) {
      RankStep sender;
      sender.step = step;
      sender.start_ns = 1000;
      sender.end_ns = 1015;
      sender.transfers = {{TransferStream::kComm, "hidden", "", "p2p0:0F0", 64, 1010, 1015}};
      sender.events = {{StepAction::kForward, 0, 0, 0, 0, "layer0.mlp", 1000, 1010, {}, {}},
                       {StepAction::kSend, 0, 0, 0, -1, "hidden", 1010, 1010, {0}, {}},
                       {StepAction::kSent, 0, 0, 0, -1, "hidden", 1010, 1015, {}, {0}}};
      first.write(sender);
      RankStep receiver;
      receiver.rank = 1;
      receiver.step = step;
      receiver.start_ns = 1005;
      receiver.end_ns = 1035;
      receiver.transfers = {{TransferStream::kComm, "hidden", "", "p2p0:0F0", 64, 1005, 1015}};
      receiver.events = {{StepAction::kPost, 0, 1, 0, -1, "hidden", 1005, 1005, {0}, {}},
                         {StepAction::kReceive, 0, 1, 0, -1, "hidden", 1005, 1015, {}, {0}},
                         {StepAction::kForward, 0, 1, 0, 0, "layer1.mlp", 1015, 1035, {}, {}}};
      second.write(receiver);
    }
  }
  Outcome replay(std::vector<std::string> more) const {
    std::vector<std::string> flags = {"schedule", "--replay", path("run.trace-0.jsonl"),
                                      path("run.trace-1.jsonl")};
    flags.insert(flags.end(), more.begin(), more.end());
    return run_line(flags);
  }
};

TEST_F(ScheduleReplay, JsonHasEveryEventAsExecutedAndAsScheduled) {
  write_traces();
  const Outcome at = replay({"--json", "-"});
  ASSERT_EQ(at.code, 0) << at.err;
  const Json json = Json::parse(at.out);
  EXPECT_EQ(json["steps"].size(), 1U);
  const Json& step = json["steps"][0];
  EXPECT_EQ(step["measured_ns"], 35);
  EXPECT_EQ(step["predicted_ns"], 35);
  const Json& receiver = step["ranks"][1];
  EXPECT_EQ(receiver["events"][1], Json::parse(R"({"action": "receive", "name": "hidden",
      "stage": 1, "microbatch": 0, "executed": [5, 10, 15], "scheduled": [5, 10, 15]})"));
  EXPECT_EQ(receiver["transfers"][0], Json::parse(R"({"stream": "comm", "name": "hidden",
      "key": "p2p0:0F0", "bytes": 64, "issued_by": "post", "executed": [5, 15],
      "scheduled": [5, 15]})"));
  EXPECT_EQ(receiver["executed"]["compute_ns"], 20);
  EXPECT_EQ(receiver["scheduled"]["comm_wait_ns"], 10);
  EXPECT_EQ(step["ranks"][0]["transfers"][0]["issued_by"], "send");
}

TEST_F(ScheduleReplay, TableHasEveryStepAndRank) {
  write_traces(2);
  const Outcome at = replay({"--json", path("a.json")});
  ASSERT_EQ(at.code, 0) << at.err;
  EXPECT_THAT(at.out, AllOf(HasSubstr("step 1: measured 0.000 ms, predicted 0.000 ms, +0.0%"),
                            HasSubstr("   1  executed "),
                            HasSubstr("2 step(s), median distance of the prediction 0.0%")));
  EXPECT_EQ(read_json_file(path("a.json"))["steps"].size(), 2U);
}

TEST_F(ScheduleReplay, StepsThatARankHasNotFinishedAreNamed) {
  write_traces(2);
  std::string lines;
  std::ifstream file(path("run.trace-1.jsonl"));
  for (std::string line; std::getline(file, line);) {
    if (line.find(R"("step":1)") == std::string::npos) lines += line + "\n";
  }
  file.close();
  write("run.trace-1.jsonl", lines);
  EXPECT_THAT(replay({}).out, HasSubstr("step 1 left out"));
  EXPECT_EQ(Json::parse(replay({"--json", "-"}).out)["left_out_steps"], Json::parse("[1]"));
}

TEST_F(ScheduleReplay, Refuses) {
  write_traces();
  const auto refused = [](const Outcome& at, const char* what) {
    EXPECT_EQ(at.code, 2);
    EXPECT_EQ(at.out, "");
    EXPECT_THAT(at.err, HasSubstr(what));
  };
  refused(replay({"--pp", "2"}), "--pp: found with --replay; allowed --json alone");
  refused(replay({"--overlap"}), "--overlap: found with --replay");
  refused(run_line({"schedule", "--replay", path("none")}), "none");
  refused(run_line({"schedule", "--replay", write("empty", "")}), "--replay: found no whole step");
  refused(run_line({"schedule", "--replay", path("run.trace-0.jsonl")}),
          "key: found p2p0:0F0 on one rank only; allowed the traces of all members");
}

}  // namespace
}  // namespace bagualu
