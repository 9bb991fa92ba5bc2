#include "bagualu/schedule/step_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class StepTrace : public testing::Test {
 protected:
  StepTrace() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::path(testing::TempDir()) / (std::string("trace_") + info->name());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  ~StepTrace() override { std::filesystem::remove_all(folder_); }

  std::string refusal(const std::string& text) {
    const auto path = folder_ / "bad.jsonl";
    std::ofstream(path) << text;
    try {
      read_step_trace({path});
    } catch (const InvalidInput& error) {
      return error.what();
    }
    return "none";
  }

  std::filesystem::path folder_;
};

RankStep small_step(int rank, int64_t step) {
  RankStep at;
  at.rank = rank;
  at.step = step;
  at.start_ns = 100;
  at.end_ns = 200;
  at.transfers = {{TransferStream::kComm, "layer0.dispatch", "ep0", "ep0:0", 64, 120, 150},
                  {TransferStream::kToHost, "layer0.qkv", "d2h", "", 32, 120, 135}};
  at.events = {
      {StepAction::kForward, 0, 0, 3, 1, "layer0.qkv", 100, 120, {0, 1}, {}},
      {StepAction::kForward, 1, 0, 4, 1, "layer0.qkv", 120, 140, {}, {}},
      {StepAction::kForwardEnd, 0, 0, 3, 2, "layer0.dispatch", 142, 150, {}, {0}},
      {StepAction::kDrain, 0, 0, 3, -1, "layer0.qkv", 150, 151, {}, {1}},
  };
  return at;
}

TEST_F(StepTrace, WhatIsWrittenIsRead) {
  for (int rank : {0, 1}) {
    StepTraceWriter writer(folder_ / std::to_string(rank));
    for (int64_t step : {0, 1}) writer.write(small_step(rank, step));
  }
  EXPECT_THAT(read_step_trace({folder_ / "1", folder_ / "0"}),
              ElementsAre(small_step(0, 0), small_step(1, 0), small_step(0, 1), small_step(1, 1)));
}

TEST_F(StepTrace, ATornStepIsSkipped) {
  {
    StepTraceWriter writer(folder_ / "0");
    for (int64_t step : {0, 1}) writer.write(small_step(0, step));
  }
  const auto size = std::filesystem::file_size(folder_ / "0");
  std::filesystem::resize_file(folder_ / "0", size - 5);
  EXPECT_THAT(read_step_trace({folder_ / "0"}), ElementsAre(small_step(0, 0)));
}

TEST_F(StepTrace, OtherLinesAreSkippedAndWrongOnesNamed) {
  EXPECT_EQ(refusal("{\"type\":\"memory\",\"step\":0}\n"), "none");
  EXPECT_THAT(refusal("{\"type\":\"action\",\"rank\":0,\"step\":0,\"slot\":0,\"stage\":0,"
                      "\"microbatch\":0,\"action\":\"forwards\"}\n"),
              HasSubstr("line 1: action: found \"forwards\""));
  EXPECT_THAT(refusal("{]\n"), HasSubstr("line 1"));
  EXPECT_THAT(refusal("{\"type\":\"rank_step\",\"rank\":0,\"step\":0,\"start_ns\":5,"
                      "\"end_ns\":4}\n"),
              HasSubstr("ends before its last event"));
}

TEST_F(StepTrace, FaultsAreNamed) {
  RankStep at = small_step(0, 0);
  EXPECT_EQ(step_fault(at), "");
  at.events[2].awaits = {2};
  EXPECT_EQ(step_fault(at), "rank 0 event 2 (forward_end layer0.dispatch) names transfer 2 of 2");
  at = small_step(0, 0);
  at.events[1].start_ns = 119;
  EXPECT_THAT(step_fault(at), HasSubstr("event 1 (forward layer0.qkv) starts before"));
  at = small_step(0, 0);
  std::swap(at.events[0].issues, at.events[3].issues);
  EXPECT_THAT(step_fault(at), HasSubstr("awaits transfer 0 before it is issued"));
  at = small_step(0, 0);
  at.transfers.emplace_back();
  EXPECT_THAT(step_fault(at), HasSubstr("is issued 0 times"));
}

// Compute 100-140 (two events); communication 120-150, of it 120-140 beside compute; the copy
// 120-135 wholly. Waits 142-150 and 150-151.
TEST_F(StepTrace, OverlapIsWhatRanBesideCompute) {
  const StepOverlap at = step_overlap(small_step(0, 0));
  EXPECT_EQ(at.compute_ns, 40);
  EXPECT_EQ(at.comm_ns, 30);
  EXPECT_EQ(at.comm_beside_ns, 20);
  EXPECT_EQ(at.copy_ns, 15);
  EXPECT_EQ(at.copy_beside_ns, 15);
  EXPECT_EQ(at.comm_wait_ns, 8);
  EXPECT_EQ(at.copy_wait_ns, 1);
}

}  // namespace
}  // namespace bagualu
