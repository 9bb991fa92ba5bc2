#include "bagualu/sim/run_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class RunLogFile : public testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::path(testing::TempDir()) /
            ("bagualu_run_log_" +
             std::string(testing::UnitTest::GetInstance()->current_test_info()->name()));
  }
  void TearDown() override { std::filesystem::remove(path_); }

  LoggedRun read(const std::string& text) {
    std::ofstream(path_) << text;
    return read_run_log(path_);
  }
  std::string complaint(const std::string& text) {
    try {
      read(text);
    } catch (const InvalidInput& error) {
      return error.what();
    }
    return "";
  }

  const std::string run_ =
      R"({"type": "run", "version": 1, "model": {"version": 1, "layers": 1, "hidden": 16,
 "heads": 1, "kv_heads": 1, "head_dim": 16, "vocab": 8, "experts": 2, "top_k": 1,
 "expert_ffn": 16}})";
  const std::string start_ =
      R"({"type": "start", "first_step": 0, "options": {"world_size": 1, "ep_size": 1,
 "micro_batch_size": 1, "seq": 4, "microbatches": 2, "dtype": "fp32", "budget_bytes": 0,
 "pp_size": 1, "virtual_per_rank": 1, "stage_layers": [1], "pipeline": "1f1b", "overlap": false,
 "policy": "adaptive", "policy_args": {}, "host_budget_bytes": 0, "chunk_rows": 256,
 "allow_quantise": false, "link_bytes_per_s": 0, "link_latency_us": 0},
 "live_bytes": [5],
 "attention_scratch_bytes": [64, 128], "profiles": [{}], "profile_of": [0]})";
  const std::string step_ =
      R"({"type": "step", "step": 0, "step_ns": 9, "ranks": [{"rank": 0, "peak_bytes": 7,
 "host_peak_bytes": 0, "end_bytes": 5, "loads": [[4, 3], [2, 2]], "plans": ["sr"],
 "plan_of": [0, 0], "pass_bytes": [[7, 5], [6, 5]], "passes_ns": 4, "step_ns": 8,
 "decision_ns": [1, 2], "cache_hits": 2}]})";
  const std::string memory_ =
      R"({"type": "memory", "step": 0, "rank": 0, "points": [[1, 6, "forward embedding"]]})";

  static std::string with(std::string line, const std::string& old, const std::string& now) {
    const size_t at = line.find(old);
    if (at == std::string::npos) ADD_FAILURE() << old;
    return at == std::string::npos ? line : line.replace(at, old.size(), now);
  }
  std::string step(int number) const {
    return with(step_, "\"step\": 0", "\"step\": " + std::to_string(number));
  }
  std::string start(int first_step) const {
    return with(start_, "\"first_step\": 0", "\"first_step\": " + std::to_string(first_step));
  }
  // What a log with this in place of that is refused for.
  std::string of_start(const std::string& old, const std::string& now) {
    return complaint(lines({run_, with(start_, old, now), step_}));
  }
  std::string of_step(const std::string& old, const std::string& now) {
    return complaint(lines({run_, start_, with(step_, old, now)}));
  }

  static std::string lines(std::initializer_list<std::string> list) {
    std::string text;
    for (std::string one : list) {
      std::erase(one, '\n');
      text += one + "\n";
    }
    return text;
  }

  std::filesystem::path path_;
};

TEST_F(RunLogFile, HoldsLoadsPlansAndBytesOfEveryStep) {
  const LoggedRun run = read(lines({run_, start_, R"({"type": "later"})", step_, memory_}) +
                             R"({"type": "step", "st)");
  ASSERT_EQ(run.starts.size(), 1U);
  EXPECT_EQ(run.model.experts, 2);
  EXPECT_EQ(run.starts[0].scratch.backward_bytes, 128);
  ASSERT_EQ(run.starts[0].steps.size(), 1U);
  const LoggedStep& step = run.starts[0].steps[0];
  ASSERT_EQ(step.ranks.size(), 1U);
  EXPECT_EQ(step.ranks[0].loads[1][0], (LayerLoad{2, 2}));
  EXPECT_EQ(step.ranks[0].plans, (std::vector<std::string>{"sr", "sr"}));
  EXPECT_EQ(step.ranks[0].passes[1], (PassLevel{6, 5}));
  EXPECT_EQ(step.memory_rank, 0);
  EXPECT_EQ(step.memory[0], (LivePoint{6, "forward embedding"}));
}

TEST_F(RunLogFile, WithoutAStartNamesItsLine) {
  EXPECT_NE(complaint(lines({run_, step_})).find(":2: type: found step before any \"start\""),
            std::string::npos);
  EXPECT_NE(complaint(lines({run_, start_})).find("steps: found none"), std::string::npos);
}

TEST_F(RunLogFile, RefusesAStepWithoutAMicrobatch) {
  std::string torn = step_;
  torn.replace(torn.find("[[4, 3], [2, 2]]"), 16, "[[4, 3]]");
  EXPECT_NE(complaint(lines({run_, start_, torn})).find("loads: found 1"), std::string::npos);
}

TEST_F(RunLogFile, ThatIsMissingIsNamed) {
  EXPECT_THROW(read_run_log("/no/such/run.jsonl"), InvalidInput);
}

TEST_F(RunLogFile, OfAResumedRunHasItsStartsOneAfterAnother) {
  // Resumed at 2, then at 1, which dropped the step of the second start, then after a gap that
  // another log has.
  const LoggedRun run =
      read(lines({run_, start_, step_, start(2), start(1), step(1), start(7), step(7), step(8)}));
  ASSERT_EQ(run.starts.size(), 4U);
  EXPECT_TRUE(run.starts[1].steps.empty());
  EXPECT_EQ(run.starts[3].steps[1].step, 8);
  EXPECT_THAT(complaint(lines({run_, start_, step_, step(1), start(1), step(1)})),
              HasSubstr(":5: first_step: found 1; allowed above step 1"));
}

TEST_F(RunLogFile, RefusesStepsThatDoNotFollowOneAnother) {
  EXPECT_THAT(complaint(lines({run_, start_, step(1)})), HasSubstr(":3: step: found 1; allowed 0"));
  EXPECT_THAT(complaint(lines({run_, start_, step_, step(2)})),
              HasSubstr(":4: step: found 2; allowed 1"));
  EXPECT_THAT(complaint(lines({run_, start_, step_, step(1), step(1)})),
              HasSubstr(":5: step: found 1; allowed 2"));
  EXPECT_THAT(complaint(lines({run_, start_, step_, step(1), step_})),
              HasSubstr(":5: step: found 0; allowed 2"));
}

TEST_F(RunLogFile, MayBeTornInItsLastLineAlone) {
  EXPECT_THAT(complaint(lines({run_, start_, R"({"type": "step", "st)", step_})),
              AllOf(HasSubstr(":3: line: found no JSON"), HasSubstr("only a last line")));
  EXPECT_EQ(read(lines({run_, start_, step_, "", "{\"type\": "})).starts[0].steps.size(), 1U);
}

TEST_F(RunLogFile, RefusesNumbersThatNoRunHas) {
  EXPECT_THAT(of_start("\"link_bytes_per_s\": 0", "\"link_bytes_per_s\": -1"),
              HasSubstr(".options: link_bytes_per_s: found -1"));
  EXPECT_THAT(of_start("\"link_latency_us\": 0", "\"link_latency_us\": -1"),
              HasSubstr("link_latency_us: found -1"));
  EXPECT_THAT(of_start("\"link_latency_us\": 0", "\"link_latency_us\": 9000000000000000"),
              HasSubstr("allowed an integer from 0 to 1000000"));
  EXPECT_THAT(of_start("\"first_step\": 0", "\"first_step\": -1"),
              HasSubstr(":2: first_step: found -1"));
  for (const char* now : {"\"step_ns\": 0", "\"step_ns\": -5"}) {
    EXPECT_THAT(of_step("\"step_ns\": 9", now), HasSubstr(":3: step_ns: found"));
    EXPECT_THAT(of_step("\"step_ns\": 8", now), HasSubstr(":3.ranks[0]: step_ns: found"));
  }
  EXPECT_THAT(of_step("\"passes_ns\": 4", "\"passes_ns\": 0"),
              HasSubstr("passes_ns: found 0; allowed an integer of at least 1"));
  EXPECT_THAT(of_step("[1, 2], \"cache_hits\"", "[1, -2], \"cache_hits\""),
              HasSubstr("decision_ns[1]: found -2"));
  EXPECT_THAT(of_step("\"rank\": 0, ", ""), HasSubstr("rank: found nothing"));
  EXPECT_THAT(of_step("\"rank\": 0", "\"rank\": 1"), HasSubstr("rank: found 1; allowed 0"));
}

TEST_F(RunLogFile, RefusesAnOptionLeftOut) {
  for (const char* key : {"pp_size", "virtual_per_rank", "stage_layers", "pipeline", "overlap",
                          "policy", "policy_args", "budget_bytes", "host_budget_bytes",
                          "chunk_rows", "allow_quantise", "link_bytes_per_s", "link_latency_us"}) {
    const std::string quoted = "\"" + std::string(key) + "\"";
    EXPECT_THAT(of_start(quoted, "\"other\""),
                HasSubstr(".options: " + std::string(key) + ": found nothing"));
  }
}

TEST_F(RunLogFile, NamesItselfWhereOptionsDoNotFit) {
  EXPECT_THAT(of_start("\"adaptive\"", "\"adaptable\""),
              AllOf(HasSubstr(path_.string() + ":2.options: policy: found"), HasSubstr("kwai")));
  EXPECT_THAT(of_start("\"ep_size\": 1", "\"ep_size\": 2"),
              HasSubstr(path_.string() + ":2.options: "));
}

TEST_F(RunLogFile, NamesListsThatAreNone) {
  for (const char* now : {"{}", "5", "[-1]", "[]", "null"}) {
    EXPECT_THAT(of_step("[\"sr\"]", now), HasSubstr(":3.ranks[0]: plans")) << now;
  }
  for (const char* now : {"5", "[-1]", "[[-1, 2]]", "[[1]]", "[]"}) {
    EXPECT_THAT(of_step("[[4, 3], [2, 2]]", now), HasSubstr(":3.ranks[0]: loads")) << now;
  }
  for (const char* now : {"[[]]", "[[1]]", "5", "[-1]", "[[1, -1]]"}) {
    EXPECT_THAT(of_step("[[7, 5], [6, 5]]", now), HasSubstr(":3.ranks[0]: pass_bytes")) << now;
  }
  EXPECT_THAT(of_start("[{}]", "[]"),
              HasSubstr("profiles: found []; allowed a list of profiles, at least one"));
  for (const char* now : {"5", "[1]", "[[1, 2]]"}) {
    const std::string memory = with(memory_, "[[1, 6, \"forward embedding\"]]", now);
    EXPECT_THAT(complaint(lines({run_, start_, step_, memory})), HasSubstr(":4: points")) << now;
  }
}

TEST_F(RunLogFile, SaysWhatARunLogIs) {
  const auto says = AllOf(HasSubstr(path_.string()), HasSubstr("`bagualu train --log`"));
  EXPECT_THAT(complaint(lines({start_, step_})), says);
  EXPECT_THAT(complaint("{\"version\": 1}\n"), says);
  EXPECT_THAT(complaint(std::string("\x7f"
                                    "ELF\0\1\n\xff\xfe\n",
                                    10)),
              says);
  EXPECT_THAT(complaint(""), says);
  EXPECT_THAT(complaint(lines({run_, run_})), HasSubstr(":2: type: found a second \"run\""));
  try {
    read_run_log(testing::TempDir());
    FAIL() << "a folder was read";
  } catch (const InvalidInput& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("found a folder"), HasSubstr("train --log")));
  }
}

}  // namespace
}  // namespace bagualu
