#include "bagualu/sim/run_log.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

class RunLogFile : public testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::path(testing::TempDir()) / "bagualu_run_log_test.jsonl";
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
 "micro_batch_size": 1, "seq": 4, "microbatches": 2, "dtype": "fp32", "budget_bytes": 0},
 "live_bytes": [5],
 "attention_scratch_bytes": [64, 128], "profiles": [{}], "profile_of": [0]})";
  const std::string step_ =
      R"({"type": "step", "step": 0, "step_ns": 9, "ranks": [{"peak_bytes": 7,
 "host_peak_bytes": 0, "end_bytes": 5, "loads": [[4, 3], [2, 2]], "plans": ["sr"],
 "plan_of": [0, 0], "pass_bytes": [[7, 5], [6, 5]], "passes_ns": 4, "step_ns": 8,
 "decision_ns": [1, 2], "cache_hits": 2}]})";
  const std::string memory_ =
      R"({"type": "memory", "step": 0, "rank": 0, "points": [[1, 6, "forward embedding"]]})";

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

}  // namespace
}  // namespace bagualu
