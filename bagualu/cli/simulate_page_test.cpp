#include "bagualu/cli/simulate_page.h"

#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include "bagualu/cli/simulate_charts.h"
#include "bagualu/cli/simulate_command.h"
#include "bagualu/cli/test_page.h"
#include "bagualu/cli/test_simulation.h"

namespace bagualu {
namespace {

SimulateReport with_pictures(const std::vector<Scenario>& scenarios) {
  SimulateRequest request;
  request.scenarios = scenarios;
  request.wants_page = true;
  std::ostringstream progress;
  return simulate(request, fake_simulator(), progress).report;
}

int64_t count(const std::string& text, const std::string& word) {
  int64_t found = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++found;
  return found;
}

TEST(SimulatePage, IsWellFormedAndFetchesNothing) {
  Scenario evil = fake_scenario("a<b>&\"'\x01\xff");
  evil.source = evil.system.source = evil.system.name = evil.job.model.name = "</style><script>";
  evil.policies[0].label = "hopeless";
  for (const auto& scenarios : std::vector<std::vector<Scenario>>{
           {}, {fake_scenario()}, {fake_scenario(), fake_scenario("large")}, {evil}}) {
    const std::string html = simulate_page(with_pictures(scenarios));
    EXPECT_EQ(fault_of(html), "");
    EXPECT_EQ(fetched_by(html), "");
    for (const char* word : {"nan", "inf "}) EXPECT_EQ(html.find(word), std::string::npos) << word;
  }
}

TEST(SimulatePage, SaysSimulatedOnWhichMachine) {
  const std::string html = simulate_page(with_pictures({fake_scenario()}));
  for (const char* words :
       {"SIMULATED, not measured", "fast (datasheet)", "made up for a test", "Throughput", "MFU",
        "Imbalance by iteration", "Memory over a step", "What a spike does"}) {
    EXPECT_NE(html.find(words), std::string::npos) << words;
  }
  EXPECT_EQ(html.find("INCOMPLETE"), std::string::npos);
}

TEST(SimulatePage, EqualReportsGiveEqualBytes) {
  EXPECT_EQ(simulate_page(with_pictures({fake_scenario()})),
            simulate_page(with_pictures({fake_scenario()})));
}

TEST(SimulatePage, StoppedRunsAreMarked) {
  SimulateReport report = with_pictures({fake_scenario()});
  report.complete = report.scenarios[0].policies[1].complete = false;
  const std::string html = simulate_page(report);
  EXPECT_NE(html.find("INCOMPLETE"), std::string::npos);
  EXPECT_NE(html.find("adaptive (incomplete)"), std::string::npos);
}

TEST(SimulatePage, MarksEveryOom) {
  // "static" died once, in iteration 19.
  const std::string html = simulate_page(with_pictures({fake_scenario()}));
  EXPECT_EQ(count(html, "static: out of memory in iteration 19"), 1);
  EXPECT_EQ(count(html, "out of memory in iteration"), 1);
}

TEST(SimulatePage, ShowsTheSpikeAndTheIterationBefore) {
  // The first of the most uneven iterations is 9; the hottest rank is the last that is traced.
  const SimulateReport report = with_pictures({fake_scenario()});
  const SpikeDetail& detail = report.scenarios[0].policies[1].detail.at(0);
  EXPECT_EQ(detail.iteration, 9);
  ASSERT_EQ(detail.pictures.size(), 3U);
  EXPECT_EQ(detail.pictures[0].iteration, 8);
  EXPECT_EQ(detail.pictures[1].iteration, 9);
  EXPECT_EQ(detail.pictures[0].rank, 6);
  ASSERT_EQ(detail.memory.size(), 2U) << "a line per pipeline rank";
  EXPECT_EQ(detail.memory[1].pp_rank, 1);
}

TEST(SimulateDetail, MemoryKeepsTheHighestOfEveryColumn) {
  // Inside the recompute, which ends at 700 of 1,000 ms, 31 GiB are alive; behind it 30, then 10.
  const TracedIteration traced = fake_trace(fake_scenario(), {}, {}, 9, {6});
  const MemoryLine line = memory_line(traced.ranks[0]);
  EXPECT_EQ(*std::max_element(line.bytes.begin(), line.bytes.end()), 31 * kGiB);
  EXPECT_EQ(line.bytes.front(), 10 * kGiB) << "static bytes before the first operator ends";
  EXPECT_DOUBLE_EQ(line.end_ms.back(), 1000.0);
}

TEST(SimulateDetail, StreamsShowWhatFilledMostOfATime) {
  const TracedIteration traced = fake_trace(fake_scenario(), {}, {}, 9, {6});
  const StreamPicture picture = stream_picture(traced, traced.ranks[0]);
  ASSERT_EQ(picture.streams.size(), 6U);
  ASSERT_EQ(picture.streams[0].size(), 3U) << "nothing runs from 300 to 600 ms";
  EXPECT_NEAR(picture.streams[0][0].end_ms, 300, 1);
  EXPECT_NEAR(picture.streams[0][1].begin_ms, 600, 1);
  EXPECT_EQ(stream_kinds()[static_cast<size_t>(picture.streams[0][1].kind)], "recompute");
  EXPECT_EQ(picture.streams[2].at(0).name, "offload layer0.rows");
}

TEST(SimulateDetail, KindsFollowStreamAndWords) {
  const auto kind = [](SimStream stream, const char* name) {
    return stream_kinds()[static_cast<size_t>(stream_kind(stream, name))];
  };
  EXPECT_EQ(kind(SimStream::kCompute, "weight_grad layer1.qkv"), "backward");
  EXPECT_EQ(kind(SimStream::kCompute, "decode layer1.rows"), "other compute");
  EXPECT_EQ(kind(SimStream::kComm, "backward layer1.combine"), "exchange of rows");
  EXPECT_EQ(kind(SimStream::kSend, "forward stage_send"), "between stages");
  EXPECT_EQ(kind(SimStream::kToHost, "offload layer1.rows"), "to the host");
}

TEST(SimulateCharts, LongRunsAreThinnedAndKeepTheirSpikes) {
  ImbalanceChart chart;
  for (int64_t i = 0; i < 100'000; ++i) chart.points.emplace_back(i, i == 77'777 ? 2.6 : 1.05);
  const std::string svg = imbalance_chart(chart);
  EXPECT_NE(svg.find("iteration 77777: 2.600x"), std::string::npos);
  EXPECT_EQ(count(svg, "<circle"), 1000);
}

}  // namespace
}  // namespace bagualu
