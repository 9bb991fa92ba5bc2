#include "bagualu/schedule/memory_snapshot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

using testing::HasSubstr;

std::vector<RankSnapshot> read(const char* text) {
  return memory_snapshot_from_json(parse_json_object(text, "snapshot"), "snapshot");
}

TEST(MemorySnapshot, ReadsPlainBuckets) {
  const auto ranks = read(R"({"format": "bagualu.memory_snapshot", "version": 1, "ranks": [
      {"rank": 3, "parameters_bytes": 100, "static_bytes": 700, "peak_bytes": 1000}]})");
  ASSERT_EQ(ranks.size(), 1u);
  EXPECT_EQ(ranks[0].rank, 3);
  EXPECT_EQ(ranks[0].bucket_bytes.at("parameters"), 100);
  EXPECT_EQ(ranks[0].bucket_bytes.at("activations"), 300);  // peak less static
}

TEST(MemorySnapshot, ReadsMemoryStatsByRank) {
  const auto ranks = read(R"({"0": {"allocated_bytes.all.peak": 900, "allocated_bytes.all.current":
      400, "reserved_bytes.all.peak": 1200, "num_ooms": 0}, "8": {"allocated_bytes.all.peak": 800}})");
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_EQ(ranks[0].bucket_bytes.at("static"), 400);
  EXPECT_EQ(ranks[0].bucket_bytes.at("activations"), 500);
  EXPECT_EQ(ranks[0].bucket_bytes.at("reserved"), 1200);
  EXPECT_EQ(ranks[1].rank, 8);
  EXPECT_FALSE(ranks[1].bucket_bytes.contains("static"));
}

TEST(MemorySnapshot, FindsThePeakInTheHistoryOfAllocations) {
  // 600 live now; before: +300 (900 alive), then 200 of the later ones freed.
  const auto ranks = read(R"({"segments": [{"total_size": 2000, "blocks": [
      {"size": 400, "state": "active_allocated",
       "frames": [{"filename": "torch/optim/adam.py", "name": "_init_group"}]},
      {"size": 200, "state": "active_allocated"}, {"size": 1400, "state": "inactive"}]}],
      "device_traces": [[{"action": "alloc", "addr": 1, "size": 300},
                         {"action": "free_requested", "addr": 1, "size": 300},
                         {"action": "free_completed", "addr": 1, "size": 300}]]})");
  ASSERT_EQ(ranks.size(), 1u);
  EXPECT_EQ(ranks[0].bucket_bytes.at("static"), 600);
  EXPECT_EQ(ranks[0].bucket_bytes.at("optimizer"), 400);
  EXPECT_EQ(ranks[0].bucket_bytes.at("peak"), 900);
  EXPECT_EQ(ranks[0].bucket_bytes.at("activations"), 300);
  EXPECT_EQ(ranks[0].bucket_bytes.at("reserved"), 2000);
}

TEST(MemorySnapshot, NamesWhatItCannotRead) {
  EXPECT_THROW(read(R"({"format": "other"})"), InvalidInput);
  EXPECT_THROW(read(R"({"rank": 0, "bytes": 3})"), InvalidInput);
  EXPECT_THROW(read(R"({"segments": [{"total_size": 5}]})"), InvalidInput);
  try {
    read(R"({"segments": [{"total_size": 5, "blocks": []}]})");
    FAIL();
  } catch (const InvalidInput& error) {
    EXPECT_THAT(error.what(), HasSubstr("no live block"));
  }
}

TEST(MemorySnapshot, ComparesEveryMeasuredBucketWithItsPipelineRank) {
  Job job;
  ModelSpec& m = job.model;
  m.layers = 4;
  m.hidden = 128;
  m.heads = m.kv_heads = 2;
  m.head_dim = 64;
  m.vocab = 1024;
  m.dense_ffn = 512;
  m.moe_layer.assign(4, 0);
  job.seq = 256;
  job.layout.pp = 2;
  job.layout.world_size = 4;
  job.microbatches = 4;
  job.stages = default_stages(m, 2, 1);
  validate(job, "job");
  const JobMemory memory(job);
  const auto rows = compare_memory({{2, {{"static", 1000}, {"peak", 2000}, {"optimizer", 10}}}},
                                   job, {}, "snapshot");
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].bucket, "optimizer");
  EXPECT_GT(rows[0].predicted_bytes, 0);
  EXPECT_EQ(rows[1].pp_rank, 1);  // ranks 2 and 3
  EXPECT_EQ(rows[1].predicted_bytes, memory.static_bytes(1));
  EXPECT_EQ(rows[2].predicted_bytes, memory.peak_bytes(1, {}));
  EXPECT_THROW(compare_memory({{4, {{"peak", 1}}}}, job, {}, "snapshot"), InvalidInput);
}

}  // namespace
}  // namespace bagualu
