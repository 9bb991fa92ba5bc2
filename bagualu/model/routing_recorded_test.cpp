#include <gtest/gtest.h>

#include <numeric>

#include "bagualu/base/error.h"
#include "bagualu/model/routing_source.h"
#include "bagualu/model/routing_trace.h"

namespace bagualu {
namespace {

using Rows = std::vector<int32_t>;

/// Cells of (step, micro-batch, layer) with the counts of ranks first_rank, first_rank + 1, ...
RoutingTrace trace_of(
    const std::vector<std::pair<std::vector<int32_t>, std::vector<int64_t>>>& cells,
    int32_t first_rank = 0) {
  RoutingTrace trace;
  for (const auto& [place, counts] : cells) {
    for (size_t r = 0; r < counts.size(); ++r) {
      trace.records.push_back(
          {place[0], place[1], place[2], first_rank + static_cast<int32_t>(r), counts[r]});
    }
  }
  return trace;
}

Rows rows_of(const RoutingTrace& trace, const RoutingGroup& group, int64_t iteration,
             int64_t replica = 0) {
  Rows rows;
  recorded_source(trace, group, "run.log")->rows(iteration, replica, group, &rows);
  return rows;
}

TEST(RecordedSource, GivesTheRowsOfTheTraceOverAndOver) {
  const RoutingTrace trace = trace_of(
      {{{4, 0, 1}, {60, 40}}, {{4, 1, 1}, {55, 45}}, {{5, 0, 1}, {50, 50}}, {{5, 1, 1}, {20, 80}}});
  const RoutingGroup group{1, 2, 2, 50, 100, 1};
  EXPECT_EQ(rows_of(trace, group, 0), (Rows{60, 40, 55, 45}));
  EXPECT_EQ(rows_of(trace, group, 1), (Rows{50, 50, 20, 80}));
  EXPECT_EQ(rows_of(trace, group, 2), rows_of(trace, group, 0));
  EXPECT_NE(rows_of(trace, group, 0, 1), rows_of(trace, group, 0)) << "starts elsewhere";
}

TEST(RecordedSource, MicrobatchesPastTheLastWrapRound) {
  const RoutingTrace trace = trace_of({{{0, 0, 0}, {60, 40}}, {{0, 1, 0}, {55, 45}}});
  EXPECT_EQ(rows_of(trace, {1, 3, 2, 50, 100, 1}, 0), (Rows{60, 40, 55, 45, 60, 40}));
}

TEST(RecordedSource, ScalesToTheGroupsRowsWithExactSums) {
  const RoutingTrace trace = trace_of({{{0, 0, 0}, {1, 1, 1}}});
  // 10 * 3 / 3 each; then 7 of 10 parts of 30 rows are 21, more than 15: 6 rows go to the others.
  EXPECT_EQ(rows_of(trace, {1, 1, 3, 10, 30, 1}, 0), (Rows{10, 10, 10}));
  const RoutingTrace hot = trace_of({{{0, 0, 0}, {7, 2, 1}}});
  EXPECT_EQ(rows_of(hot, {1, 1, 3, 10, 30, 1}, 0), (Rows{21, 6, 3}));
  const Rows cut = rows_of(hot, {1, 1, 3, 10, 15, 1}, 0);
  EXPECT_EQ(cut[0], 15);
  EXPECT_EQ(std::accumulate(cut.begin(), cut.end(), 0), 30);
  EXPECT_GT(cut[1], cut[2]);
  // 2 of 3 parts of 11 * 2 = 22 rows: 14.67; the larger remainder takes the row left over.
  EXPECT_EQ(rows_of(trace_of({{{0, 0, 0}, {2, 1}}}), {1, 1, 2, 11, 22, 1}, 0), (Rows{15, 7}));
  EXPECT_EQ(rows_of(trace_of({{{0, 0, 0}, {0, 0}}, {{1, 0, 0}, {1, 0}}}), {1, 1, 2, 11, 22, 1}, 0),
            (Rows{11, 11}));
}

TEST(RecordedSource, ACellWithARankMissingIsAtTheLayersMean) {
  RoutingTrace trace = trace_of({{{0, 0, 0}, {60, 40}}, {{0, 1, 0}, {80, 20}}});
  trace.records.push_back({0, 2, 0, 0, 99});
  EXPECT_EQ(rows_of(trace, {1, 3, 2, 50, 100, 1}, 0), (Rows{60, 40, 80, 20, 70, 30}));
}

TEST(RecordedSource, FoldsExpertsOntoTheRanks) {
  RoutingTrace trace = trace_of({{{0, 0, 0}, {10, 20, 30, 40}}});
  trace.per_expert = true;
  EXPECT_EQ(rows_of(trace, {1, 1, 2, 50, 100, 1}, 0), (Rows{30, 70}));
}

TEST(RecordedSource, ReplicasTakePartsOfATraceOfSeveralGroups) {
  // Pipeline: layer 3 lies on ranks 4 to 7, and both layers on two expert groups.
  RoutingTrace trace = trace_of({{{0, 0, 1}, {60, 40, 10, 90}}});
  const RoutingTrace second = trace_of({{{0, 0, 3}, {50, 50, 20, 80}}}, 4);
  trace.records.insert(trace.records.end(), second.records.begin(), second.records.end());
  const RoutingGroup group{2, 1, 2, 50, 100, 2};
  EXPECT_EQ(rows_of(trace, group, 0, 0), (Rows{60, 40, 50, 50}));
  EXPECT_EQ(rows_of(trace, group, 0, 1), (Rows{10, 90, 20, 80}));
}

TEST(RecordedSource, TooFewRanksOrLayersAreRefusedWithBothNumbers) {
  const RoutingTrace trace = trace_of({{{0, 0, 0}, {60, 40}}});
  const auto message = [&](const RoutingTrace& of, const RoutingGroup& group) {
    try {
      recorded_source(of, group, "run.log");
    } catch (const InvalidInput& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message(trace, {1, 1, 4, 50, 100, 1}),
            "run.log: ranks: found 2 in layer 0; allowed 4 of one expert group, or a multiple");
  EXPECT_EQ(message(trace, {3, 1, 2, 50, 100, 1}),
            "run.log: layers: found 1 with experts; allowed at least 3, those of the model");
  RoutingTrace experts = trace;
  experts.per_expert = true;
  EXPECT_NE(message(experts, {1, 1, 3, 50, 100, 1}).find("divisor of 2"), std::string::npos);
  EXPECT_NE(message(RoutingTrace(), {1, 1, 3, 50, 100, 1}).find("found none"), std::string::npos);
}

}  // namespace
}  // namespace bagualu
