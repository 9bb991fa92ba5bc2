#include "bagualu/model/routing_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "bagualu/base/error.h"
#include "bagualu/base/json.h"

namespace bagualu {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

/// Reads a text as the file "log"; a last line without line end counts as such.
RoutingTrace read(const std::string& text) {
  RoutingLogReader reader;
  reader.begin_file("log");
  TextLine line;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    line = {std::string_view(text).substr(begin, end - begin), line.number + 1,
            end != std::string::npos, false};
    reader.add(line);
    begin = end == std::string::npos ? text.size() : end + 1;
  }
  reader.end_file();
  return reader.finish();
}

std::string event(int id, int step, const std::string& microbatch, int layer, int rank, int tokens,
                  const std::string& kind = "alloc") {
  const std::string s = std::to_string(step);
  return "moe_token_event: event_id=" + std::to_string(id) + ", step=" + s + ", iteration=" + s +
         ", microbatch=" + microbatch + ", phase=" + (kind == "alloc" ? "forward" : "backward") +
         ", event=" + kind + ", layer=" + std::to_string(layer) + ", rank=" + std::to_string(rank) +
         ", received_tokens=" + std::to_string(tokens);
}

std::string step_line(int step, int layer, int rank, int tokens) {
  return "step: " + std::to_string(step) + ", layer: " + std::to_string(layer) +
         ", rank: " + std::to_string(rank) + ", received_tokens: " + std::to_string(tokens);
}

RoutedRecord at(int step, int microbatch, int layer, int rank, int64_t tokens) {
  return {step, microbatch, layer, rank, tokens};
}

TEST(RoutingLog, ReadsEventsOfInterleavedRanksBehindAnyPrefix) {
  const RoutingTrace trace =
      read("[rank1] 2026-01-02 10:00:00 INFO | " + event(0, 7, "0", 6, 1, 30) +
           "\nloading data, step: 3, loss: 2\n" + "0: " + event(0, 7, "0", 6, 0, 10) +
           "\x1b[0m\r\n" + event(1, 7, "1", 6, 0, 12) + "\n" + event(1, 7, "1", 6, 1, 28) + "\n" +
           event(1, 7, "1", 6, 1, 28, "free") + "\n");
  EXPECT_THAT(trace.records, ElementsAre(at(7, 0, 6, 0, 10), at(7, 0, 6, 1, 30), at(7, 1, 6, 0, 12),
                                         at(7, 1, 6, 1, 28)));
  EXPECT_TRUE(trace.left_out.empty()) << "a free line says nothing new, and is no fault";
  EXPECT_EQ(trace.first_layer, 1) << "Megatron's layer_number counts from 1";
  EXPECT_EQ(trace.lines, 6);
  EXPECT_EQ(trace.used_lines, 5);
}

TEST(RoutingLog, ReadsEventsWithSpacesBetweenTheFields) {
  const RoutingTrace trace = read(
      "moe_token_event: event_id=4 step=2 iteration=2 microbatch=1 phase=forward event=alloc "
      "layer=0 rank=3 received_tokens=512 (more words)\n");
  EXPECT_THAT(trace.records, ElementsAre(at(2, 1, 0, 3, 512)));
  EXPECT_EQ(trace.first_layer, 0) << "a layer 0: counted from 0";
}

TEST(RoutingLog, ReadsStepLinesAndPassesOverTheirSummaries) {
  const RoutingTrace trace =
      read("| " + step_line(0, 6, 24, 3755) + "\n" + step_line(0, 6, 25, 4437) + "\n" +
           "| step: 0, layer: 6, average_received_tokens: 4096.0, "
           "max_received_tokens: 4437, imbalance_ratio: 1.08\n"
           "global_step: 3, layer: 2\n");
  EXPECT_THAT(trace.records, ElementsAre(at(0, -1, 6, 24, 3755), at(0, -1, 6, 25, 4437)));
  EXPECT_TRUE(trace.left_out.empty());
}

TEST(RoutingLog, NumbersMicrobatchesByOrderWhereTheLogDoesNot) {
  const RoutingTrace events =
      read(event(0, 1, "unknown", 2, 0, 5) + "\n" + event(1, 1, "unknown", 2, 0, 6) + "\n" +
           event(0, 1, "unknown", 2, 0, 5) + "\n");
  EXPECT_THAT(events.records, ElementsAre(at(1, 0, 2, 0, 5), at(1, 1, 2, 0, 6)));
  EXPECT_TRUE(events.numbered_by_order);
  EXPECT_EQ(events.left_out_count(LeftOutReason::kRepeated), 1) << "event 0 stands twice";
  const RoutingTrace lines = read(step_line(0, 1, 0, 7) + "\n" + step_line(0, 1, 0, 7) + "\n");
  EXPECT_THAT(lines.records, ElementsAre(at(0, 0, 1, 0, 7), at(0, 1, 1, 0, 7)))
      << "without an identity two lines are two micro-batches";
}

TEST(RoutingLog, EventsAreWorthMoreThanStepLinesOfTheSameRows) {
  const RoutingTrace trace =
      read(event(10, 7, "3", 6, 24, 100) + "\n" + step_line(7, 6, 24, 100) + "\n");
  EXPECT_THAT(trace.records, ElementsAre(at(7, 3, 6, 24, 100)));
  EXPECT_EQ(trace.left_out_count(LeftOutReason::kOtherForm), 1);
}

TEST(RoutingLog, CountsTornLinesAndSaysWhere) {
  const RoutingTrace trace =
      read(event(0, 0, "0", 1, 0, 5) + "\n" +
           "moe_token_event: event_id=1, step=0, iteration=0, microba\n" +  // cut
           "moe_token_event: event_id=2, step=0, iteration=1" + step_line(0, 9, 0, 8) +
           "\n" +  // two writers on one line: the second is whole
           "step: 0, layer: 1, rank: 0, received_tokens: 55" + step_line(0, 9, 1, 8) +
           "\n" +  // a number that another line touches may have lost digits
           "step: 0, layer: 1, rank: 0x, received_tokens: 5\n");
  EXPECT_THAT(trace.records,
              ElementsAre(at(0, -1, 9, 0, 8), at(0, -1, 9, 1, 8), at(0, 0, 1, 0, 5)));
  ASSERT_EQ(trace.left_out.size(), 1U);
  EXPECT_EQ(trace.left_out[0].reason, LeftOutReason::kTorn);
  EXPECT_EQ(trace.left_out[0].count, 4);
  EXPECT_THAT(trace.left_out[0].places, ElementsAre("log:2", "log:3", "log:4", "log:5"));
}

TEST(RoutingLog, LeavesOutWhatNoJobCanHave) {
  const RoutingTrace trace = read(event(0, 0, "0", 1, 0, 5) + "\n" +
                                  "moe_token_event: event_id=1, step=0, iteration=0, "
                                  "microbatch=0, phase=forward, event=alloc, layer=unknown, "
                                  "rank=0, received_tokens=5\n" +
                                  "step: 0, layer: 1, rank: -1, received_tokens: 5\n" +
                                  "step: 0, layer: 1, rank: 1, received_tokens: "
                                  "99999999999999999999999\n");
  EXPECT_EQ(trace.records.size(), 1U);
  EXPECT_EQ(trace.left_out_count(LeftOutReason::kUnknownPlace), 1);
  EXPECT_EQ(trace.left_out_count(LeftOutReason::kOutOfRange), 2);
}

TEST(RoutingLog, AFreeLineStandsInForALostAllocLine) {
  const RoutingTrace trace =
      read("moe_token_event: event_id=3, step=0, it\n" + event(3, 0, "0", 1, 0, 17, "free") + "\n");
  EXPECT_THAT(trace.records, ElementsAre(at(0, 0, 1, 0, 17)));
  EXPECT_THAT(trace.notes, ElementsAre(HasSubstr("1 free lines stand in")));
}

TEST(RoutingLog, TheLaterRunOfARestartedJobCounts) {
  // Numbered: steps 0 1, then 1 again with other counts (and once the same).
  const RoutingTrace numbered =
      read(event(0, 0, "0", 1, 0, 1) + "\n" + event(1, 1, "0", 1, 0, 2) + "\n" +
           event(2, 1, "1", 1, 0, 4) + "\n" + event(0, 1, "0", 1, 0, 3) + "\n" +
           event(1, 1, "1", 1, 0, 4) + "\n");
  EXPECT_THAT(numbered.records,
              ElementsAre(at(0, 0, 1, 0, 1), at(1, 0, 1, 0, 3), at(1, 1, 1, 0, 4)));
  EXPECT_EQ(numbered.left_out_count(LeftOutReason::kReplaced), 1);
  EXPECT_EQ(numbered.left_out_count(LeftOutReason::kRepeated), 1);
  // By order: steps 0 1 2, then the job goes back to 1.
  std::string lines;
  for (const auto& [step, tokens] : {std::pair{0, 1}, {1, 2}, {2, 3}, {1, 4}, {2, 5}}) {
    lines += step_line(step, 1, 0, tokens) + "\n";
  }
  const RoutingTrace ordered = read(lines);
  EXPECT_THAT(ordered.records,
              ElementsAre(at(0, -1, 1, 0, 1), at(1, -1, 1, 0, 4), at(2, -1, 1, 0, 5)));
  EXPECT_EQ(ordered.left_out_count(LeftOutReason::kReplaced), 2);
}

TEST(RoutingLog, ReadsCsvByTheNamesOfItsHeader) {
  const RoutingTrace ranks = read(
      "rank,received_tokens,layer,step,microbatch,comment\n"
      "0,10,2,5,0,a\n1,30,2,5,0,b\n1,30,2,5\n");
  EXPECT_THAT(ranks.records, ElementsAre(at(5, 0, 2, 0, 10), at(5, 0, 2, 1, 30)));
  EXPECT_EQ(ranks.left_out_count(LeftOutReason::kTorn), 1);
  EXPECT_EQ(ranks.first_layer, 0);
  // Experts of a rank are added up.
  const RoutingTrace experts = read(
      "Iteration,Layer,Rank,Expert,Tokens\n"
      "0,1,0,0,3\n0,1,0,1,4\n0,1,1,2,5\n");
  EXPECT_THAT(experts.records, ElementsAre(at(0, -1, 1, 0, 7), at(0, -1, 1, 1, 5)));
}

TEST(RoutingLog, ARanksOwnCountIsWorthMoreThanThoseOfItsExperts) {
  const RoutingTrace trace = read(
      "{\"step\": 0, \"layer\": 1, \"rank\": 0, \"expert\": 4, \"tokens\": 3}\n"
      "{\"step\": 0, \"layer\": 1, \"rank\": 0, \"tokens\": 9}\n");
  EXPECT_THAT(trace.records, ElementsAre(at(0, -1, 1, 0, 9))) << "not 12";
  EXPECT_EQ(trace.left_out_count(LeftOutReason::kOtherForm), 1);
}

TEST(RoutingLog, ReadsCountsOfAllExpertsInOneRow) {
  const std::string row = "run_a,3,1,2,22 0 61 143\n";
  for (const std::string& header :
       {std::string("# run,step,micro_batch,layer,tokens per expert (4 experts, top-2, text)\n"),
        std::string("run,step,micro_batch,layer,counts\n"), std::string()}) {
    const RoutingTrace trace = read(header + row);
    EXPECT_TRUE(trace.per_expert);
    EXPECT_THAT(trace.records, ElementsAre(at(3, 1, 2, 0, 22), at(3, 1, 2, 1, 0),
                                           at(3, 1, 2, 2, 61), at(3, 1, 2, 3, 143)))
        << header;
  }
  const RoutingTrace columns = read("step,layer,expert_0,expert_1\n3,2,5,6\n");
  EXPECT_TRUE(columns.per_expert);
  EXPECT_THAT(columns.records, ElementsAre(at(3, -1, 2, 0, 5), at(3, -1, 2, 1, 6)));
}

TEST(RoutingLog, ExpertsOfAStepAreNumberedAllOrNone) {
  // Found by fuzzing: expert 2 without a micro-batch made a second list of the same cell.
  const RoutingTrace trace = read("step,microbatch,layer,expert,tokens\n0,0,1,1,4\n0,,1,2,5\n");
  EXPECT_THAT(trace.records, ElementsAre(at(0, 0, 1, 1, 4)));
  EXPECT_EQ(trace.left_out_count(LeftOutReason::kOtherForm), 1);
}

TEST(RoutingLog, ReadsJsonLinesOfItsOwnAndOfATrainingLog) {
  const RoutingTrace own = read(
      "{\"type\": \"routing_trace\", \"version\": 1, \"first_layer\": 1}\n"
      "{\"step\": 0, \"micro_batch\": 2, \"layer\": 3, \"ranks\": [4, 9], \"tokens\": [7, 8]}\n"
      "{\"step\": 0, \"layer\": 3, \"tok\n{\"unrelated\": 1}\n");
  EXPECT_THAT(own.records, ElementsAre(at(0, 2, 3, 4, 7), at(0, 2, 3, 9, 8)));
  EXPECT_EQ(own.first_layer, 1);
  EXPECT_EQ(own.left_out_count(LeftOutReason::kTorn), 1);
  const RoutingTrace experts =
      read("{\"step\": 0, \"micro_batch\": 0, \"layer\": 0, \"counts\": [3, 1]}");
  EXPECT_TRUE(experts.per_expert);
  EXPECT_TRUE(experts.notes.empty()) << "a closed brace is an end";
  const RoutingTrace run = read(
      "{\"type\": \"run\", \"version\": 1}\n"
      "{\"type\": \"step\", \"step\": 4, \"ranks\": [{\"rank\": 0, \"rows\": [0, 5]}, "
      "{\"rank\": 1, \"rows\": [0, 6]}]}\n");
  EXPECT_THAT(run.records, ElementsAre(at(4, -1, 1, 0, 5), at(4, -1, 1, 1, 6)))
      << "layer 0 is dense: no rows anywhere";
  EXPECT_THAT(run.notes, ElementsAre(HasSubstr("training log")));
}

TEST(RoutingLog, MixesFormsLineByLine) {
  const RoutingTrace trace = read(event(0, 0, "0", 1, 0, 5) + "\n" + "step,layer,rank,tokens\n" +
                                  "1,1,0,6\nsome words, and a comma\n" + step_line(2, 1, 0, 7) +
                                  "\n{\"step\": 3, \"layer\": 1, \"rank\": 0, \"tokens\": 8}\n" +
                                  "{\"step\": 3, \"layer\": 1, \"counts\": [8]}\n");
  EXPECT_THAT(trace.records, ElementsAre(at(0, 0, 1, 0, 5), at(1, -1, 1, 0, 6), at(2, -1, 1, 0, 7),
                                         at(3, -1, 1, 0, 8)));
  EXPECT_EQ(trace.left_out_count(LeftOutReason::kOtherForm), 1) << "experts beside ranks";
}

TEST(RoutingLog, ALastLineWithoutEndIsUsedAndPointedOut) {
  const RoutingTrace trace = read(step_line(0, 1, 0, 375));
  EXPECT_THAT(trace.records, ElementsAre(at(0, -1, 1, 0, 375)));
  EXPECT_THAT(trace.notes, ElementsAre(HasSubstr("log:1: the last line has no line end")));
}

TEST(RoutingLog, AFileWithNothingUsableIsRefusedWithTheReason) {
  EXPECT_THROW(read(""), InvalidInput);
  try {
    read("hello\nmoe_token_event: event_id=1, st\n");
    FAIL() << "nothing to use";
  } catch (const InvalidInput& error) {
    EXPECT_EQ(error.where(), "log");
    EXPECT_EQ(error.found(), "none in 2 lines, 1 torn (log:2)");
  }
}

TEST(RoutingLog, EveryCutOfALogKeepsOnlyCountsThatItHad) {
  const std::string whole = event(0, 0, "0", 1, 0, 1234) + "\n" + step_line(1, 2, 3, 5678) + "\n" +
                            "step,layer,rank,tokens\n3,4,5,6789\n";
  const std::vector<RoutedRecord> full = read(whole).records;
  for (size_t cut = 1; cut < whole.size(); ++cut) {
    const std::string begun = whole.substr(0, cut);
    try {
      const RoutingTrace trace = read(begun);
      for (const RoutedRecord& record : trace.records) {
        const bool known = std::find(full.begin(), full.end(), record) != full.end();
        EXPECT_TRUE(known || !trace.notes.empty()) << begun;
      }
    } catch (const InvalidInput&) {
      EXPECT_LT(cut, event(0, 0, "0", 1, 0, 1).size()) << begun;
    }
  }
}

TEST(RoutingTrace, WritesWhatItReadsBack) {
  const RoutingTrace ranks = read(event(0, 7, "0", 6, 1, 30) + "\n" + event(0, 7, "0", 6, 4, 10) +
                                  "\n" + event(1, 8, "0", 6, 1, 31) + "\n");
  const std::string text = to_json_lines(ranks);
  EXPECT_EQ(text,
            "{\"type\": \"routing_trace\", \"version\": 1, \"first_layer\": 1}\n"
            "{\"step\": 7, \"micro_batch\": 0, \"layer\": 6, \"ranks\": [1, 4], "
            "\"tokens\": [30, 10]}\n"
            "{\"step\": 8, \"micro_batch\": 0, \"layer\": 6, \"ranks\": [1], \"tokens\": [31]}\n");
  const RoutingTrace again = read(text);
  EXPECT_EQ(again.records, ranks.records);
  EXPECT_EQ(again.first_layer, 1);
  const RoutingTrace experts = read("a,3,1,2,22 0 61\n");
  EXPECT_EQ(to_json_lines(experts),
            "{\"step\": 3, \"micro_batch\": 1, \"layer\": 2, \"counts\": [22, 0, 61]}\n")
      << "the form that bagualu train --routing-trace reads";
  EXPECT_EQ(read(to_json_lines(experts)).records, experts.records);
}

TEST(RoutingTrace, FoldsExpertsOntoRanks) {
  const RoutingTrace trace = read("a,3,1,2,22 0 61 143\n");
  // Two ranks hold experts 0 1 and 2 3: 22 + 0 and 61 + 143.
  EXPECT_THAT(fold_experts(trace, 2, "here", "--ep").records,
              ElementsAre(at(3, 1, 2, 0, 22), at(3, 1, 2, 1, 204)));
  EXPECT_THROW(fold_experts(trace, 3, "here", "--ep"), InvalidInput);
}

TEST(RoutingLog, ReadsFilesInTheOrderGiven) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::path(testing::TempDir());
  std::ofstream(folder / "rank0.log") << step_line(0, 1, 0, 3) << "\n";
  std::ofstream(folder / "rank1.log") << step_line(0, 1, 1, 5) << "\n";
  std::ofstream(folder / "empty.log") << "nothing here\n";
  const RoutingTrace trace = read_routing_logs({folder / "rank0.log", folder / "rank1.log"});
  EXPECT_THAT(trace.records, ElementsAre(at(0, -1, 1, 0, 3), at(0, -1, 1, 1, 5)));
  EXPECT_THROW(read_routing_logs({folder / "rank0.log", folder / "empty.log"}), InvalidInput);
  EXPECT_THROW(read_routing_logs({folder / "absent.log"}), InvalidInput);
}

}  // namespace
}  // namespace bagualu
