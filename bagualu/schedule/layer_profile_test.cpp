#include "bagualu/schedule/layer_profile.h"

#include <gtest/gtest.h>

#include <string>

#include "bagualu/graph/megatron_moe.h"
#include "bagualu/graph/test_models.h"

namespace bagualu {
namespace {

Job small_job() {
  Job job;
  job.model = small_moe_spec();
  job.layout = parse_layout("tp=1,pp=1,ep=4,dp=4", "test", "layout");
  job.stages = default_stages(job.model, 1, 1);
  job.seq = 64;
  job.allocator.rounding_bytes = 1;
  return job;
}

Graph layer_graph(const Job& job) { return build_megatron_graph(job.model, megatron_options(job)); }

/// Bytes of the saved storages of a graph.
RowBytes saved_storages(const Graph& graph) {
  RowBytes sum;
  for (size_t s = 0; s < graph.storages.size(); ++s) {
    if (graph.storages[s].unit >= 0) sum += storage_row_bytes(graph, static_cast<int>(s), 1);
  }
  return sum;
}

TEST(LayerProfile, KeepsWhatTheGraphSaves) {
  const Job job = small_job();
  const Graph graph = layer_graph(job);
  const LayerProfile profile = profile_layer(graph, walk_settings(graph, job));
  EXPECT_EQ(profile.saved, saved_storages(graph));
  EXPECT_EQ(profile.input, (RowBytes{64 * 32 * 2, 0})) << "tokens * hidden, bf16";
  for (const int64_t rows : {0, 128, 1000}) {
    EXPECT_GT(profile.forward_bytes(rows), profile.saved.at(rows));
    EXPECT_GT(profile.backward_bytes(rows), profile.saved.at(rows));
  }
}

// moe_act.out: 48 * 2 bytes per row.
TEST(LayerProfile, ADiscardedOutputComesBackBeforeItIsRead) {
  Job job = small_job();
  const Graph graph = layer_graph(job);
  const LayerProfile plain = profile_layer(graph, walk_settings(graph, job));
  job.recompute.granularity = RecomputeGranularity::kSelective;
  job.recompute.modules = {"moe_act"};
  const LayerProfile less = profile_layer(graph, walk_settings(graph, job));
  EXPECT_EQ(plain.saved.per_row - less.saved.per_row, 48 * 2);
  EXPECT_EQ(plain.saved.fixed, less.saved.fixed);
  EXPECT_EQ(plain.backward_bytes(1000), less.backward_bytes(1000)) << "there again when needed";
}

TEST(LayerProfile, AWholeModuleKeepsItsInputsOnly) {
  Job job = small_job();
  job.recompute.granularity = RecomputeGranularity::kSelective;
  job.recompute.modules = {"moe"};
  const Graph graph = layer_graph(job);
  const LayerProfile profile = profile_layer(graph, walk_settings(graph, job));
  EXPECT_EQ(profile.saved.per_row, 0);
  EXPECT_GT(profile.backward_bytes(1000), profile.saved.at(1000) + 1000 * (32 + 96 + 48) * 2);
}

TEST(LayerProfile, OffloadedTensorsLeaveTheDeviceBetweenThePasses) {
  Job job = small_job();
  job.offload.modules = {"expert_fc1"};
  job.offload.min_tensor_elements = 1;
  const Graph graph = layer_graph(job);
  const LayerProfile profile = profile_layer(graph, walk_settings(graph, job));
  EXPECT_EQ(profile.offloaded, (RowBytes{0, 32 * 2})) << "the rows themselves";
  RowBytes all = profile.saved;
  all += profile.offloaded;
  EXPECT_EQ(all, saved_storages(graph));
}

TEST(LayerProfile, EveryModuleLeavesAConsistentWalk) {
  for (const bool fp8 : {false, true}) {
    for (const char* module :
         {"core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"}) {
      Job job = small_job();
      job.model = rich_moe_spec();
      job.stages = default_stages(job.model, 1, 1);
      job.fp8 = fp8;
      job.recompute.granularity = RecomputeGranularity::kSelective;
      job.recompute.modules = {module};
      for (const int64_t layer : {0, 1}) {
        MegatronGraphOptions options = megatron_options(job);
        options.first_layer = layer;
        const Graph graph = build_megatron_graph(job.model, options);
        const LayerProfile profile = profile_layer(graph, walk_settings(graph, job));
        const RowBytes all = saved_storages(graph);
        EXPECT_LE(profile.saved.at(500), all.at(500)) << module;
        EXPECT_GE(profile.backward_bytes(500), profile.saved.at(500)) << module;
      }
    }
  }
}

}  // namespace
}  // namespace bagualu
