#include "bagualu/graph/megatron_moe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/graph/native_moe.h"
#include "bagualu/graph/test_models.h"

namespace bagualu {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kKiB = 1024;

ModelSpec preset(const std::string& name) {
  return model_from_file(std::string(BAGUALU_SOURCE_DIR) + "/configs/models/" + name + ".json");
}

/// A MoE layer in the middle of DeepSeek-V3: 4096 tokens, 64 ranks share the experts, balanced
/// 4096 * 8 = 32,768 rows.
MegatronGraphOptions deepseek_layer() {
  return {.seq = 4096,
          .ep_size = 64,
          .first_layer = 10,
          .layer_count = 1,
          .has_embedding = false,
          .has_head = false};
}
constexpr LayerLoad kBalanced = {.rows = 32768};

/// Bytes by storage name of the activations that are saved, or of those that are not.
std::map<std::string, int64_t> activations(const Graph& graph, const LayerLoad& load, bool saved) {
  std::map<std::string, int64_t> bytes;
  for (const StorageSpec& storage : graph.storages) {
    if (storage.kind != StorageKind::kActivation || (storage.unit >= 0) != saved) continue;
    bytes[storage.name] = storage.bytes.eval(graph.tokens, load);
  }
  return bytes;
}

int64_t sum(const std::map<std::string, int64_t>& bytes) {
  int64_t total = 0;
  for (const auto& [name, value] : bytes) total += value;
  return total;
}

// Megatron-MoE-ModelZoo's estimate of the same layer lists these tensors (in MiB) and sums them to
// 2236. Ours adds, outside its rounding, four norm statistics and the routing map.
TEST(MegatronGraph, KeepsTheTensorsOfADeepSeekV3LayerToTheByte) {
  MegatronGraphOptions options = deepseek_layer();
  options.gate_at_combine = true;  // that estimate's setting: returned rows are kept
  const Graph graph = build_megatron_graph(preset("deepseek-v3"), options);
  const std::map<std::string, int64_t> published = {
      {"stage_recv.out", 56 * kMiB},        // the layer's input
      {"layer10.normed_attn", 56 * kMiB},   // 4096 * 7168 * 2
      {"layer10.q_compressed", 12 * kMiB},  // 4096 * 1536 * 2
      {"layer10.q_normed", 12 * kMiB},
      {"layer10.kv_compressed", 4 * kMiB},  // 4096 * 512 * 2
      {"layer10.kv_normed", 4 * kMiB},
      {"layer10.q", 192 * kMiB},  // 4096 * 128 heads * 192 * 2
      {"layer10.k", 192 * kMiB},
      {"layer10.v", 128 * kMiB},  // 4096 * 128 heads * 128 * 2
      {"layer10.attn_out", 128 * kMiB},
      {"layer10.attn_lse", 2 * kMiB},  // 4096 * 128 * 4
      {"layer10.hidden_mid", 56 * kMiB},
      {"layer10.normed_mlp", 56 * kMiB},
      {"layer10.router_probs", 2 * kMiB},     // 4096 * 256 * 2
      {"layer10.row_map", 8 * kMiB},          // 4096 * 256 * 8
      {"layer10.shared_fc1.out", 32 * kMiB},  // 4096 * 2 * 2048 * 2
      {"layer10.shared_act.out", 16 * kMiB},
      {"layer10.rows", 448 * kMiB},            // 32768 * 7168 * 2
      {"layer10.expert_fc1.out", 256 * kMiB},  // 32768 * 2 * 2048 * 2
      {"layer10.moe_act.out", 128 * kMiB},
      {"layer10.combine.returned", 448 * kMiB},  // 4096 * 8 * 7168 * 2
  };
  EXPECT_EQ(sum(published), 2236 * kMiB);
  std::map<std::string, int64_t> expected = published;
  for (const char* rstd : {"rstd_attn", "q_rstd", "kv_rstd", "rstd_mlp"}) {
    expected[std::string("layer10.") + rstd] = 16 * kKiB;  // 4096 * 4
  }
  expected["layer10.routing_map"] = 1 * kMiB;  // 4096 * 256
  EXPECT_EQ(activations(graph, kBalanced, true), expected);
}

TEST(MegatronGraph, LeavesTheIntermediatesOfADeepSeekV3LayerUnsaved) {
  const Graph graph = build_megatron_graph(preset("deepseek-v3"), deepseek_layer());
  const std::map<std::string, int64_t> expected = {
      {"layer10.q_up.out", 192 * kMiB},
      {"layer10.kv_down.out", 9 * kMiB / 2},  // 4096 * 576 * 2
      {"layer10.kv_up.out", 256 * kMiB},      // 4096 * 128 * 256 * 2
      {"layer10.attn_proj.out", 56 * kMiB},
      {"layer10.shared_fc2.out", 56 * kMiB},
      {"layer10.dispatch_send", 448 * kMiB + 128 * kKiB},  // with 8 gate weights of 4 bytes
      {"layer10.expert_fc2.out", 448 * kMiB},
      {"layer10.combine.returned", 448 * kMiB},
      {"layer10.moe_out", 56 * kMiB},
      {"layer10.hidden_out", 56 * kMiB},  // sent to the next stage
  };
  EXPECT_EQ(activations(graph, kBalanced, false), expected);
  // The gate weights inside moe_act: 448 MiB of returned rows less, 32,768 weights of 4 bytes more.
  EXPECT_EQ(sum(activations(graph, kBalanced, true)),
            (2236 - 448 + 1) * kMiB + 4 * 16 * kKiB + 128 * kKiB);
}

// Hidden 2048, experts of width 768, top-8 of 128 over 8 ranks, 4096 tokens: 32,768 rows when
// balanced; per row 4096 + 3072 + 1536 bytes.
TEST(MegatronGraph, ExpertBytesFollowTheRowsLinearly) {
  ModelSpec spec = small_moe_spec();
  spec.hidden = 2048;
  spec.expert_ffn = 768;
  spec.experts = 128;
  spec.top_k = 8;
  MegatronGraphOptions options = {.ep_size = 8};
  const auto expert_mib = [&](double factor) {
    const Graph graph = build_megatron_graph(spec, options);
    const auto bytes = activations(graph, {.rows = static_cast<int64_t>(32768 * factor)}, true);
    std::vector<int64_t> mib;
    for (const char* name : {"rows", "expert_fc1.out", "moe_act.out"}) {
      mib.push_back(bytes.at(std::string("layer0.") + name) / kMiB);
    }
    return mib;
  };
  EXPECT_EQ(expert_mib(1), (std::vector<int64_t>{128, 96, 48}));
  EXPECT_EQ(expert_mib(2.5), (std::vector<int64_t>{320, 240, 120}));
  EXPECT_EQ(expert_mib(8), (std::vector<int64_t>{1024, 768, 384}));
  spec.experts = 64;
  EXPECT_EQ(expert_mib(1), (std::vector<int64_t>{128, 96, 48})) << "the experts' number counts not";
  options.gate_at_combine = true;  // 128 MiB of returned rows more
  const auto kept = activations(build_megatron_graph(spec, options), kBalanced, true);
  EXPECT_EQ(kept.at("layer0.combine.returned"), 128 * kMiB);
  EXPECT_EQ(kept.count("layer0.row_probs"), 0u) << "the gate weights stay at the source";
}

TEST(MegatronGraph, EverySavedStorageHasItsOwnUnit) {
  const Graph graph = build_megatron_graph(rich_moe_spec(), {.ep_size = 4, .fp8_twins = true});
  std::set<std::string> names;
  for (const UnitSpec& unit : graph.units) {
    ASSERT_EQ(unit.storages.size(), 1u) << unit.name;
    EXPECT_EQ(graph.storages[unit.storages.front()].name, unit.name);
    EXPECT_TRUE(names.insert(unit.name).second) << unit.name;
    EXPECT_NE(unit.rebuild, Rebuild::kInPieces) << unit.name;
  }
  const UnitSpec& normed = graph.units[graph.find_unit("layer1.normed_attn")];
  EXPECT_EQ(normed.producer, graph.units[graph.find_unit("layer1.rstd_attn")].producer);
}

TEST(MegatronGraph, NeverRebuildsRoutingRowsAndLayerOutputs) {
  const Graph graph = build_megatron_graph(
      rich_moe_spec(), {.ep_size = 4, .first_layer = 1, .layer_count = 2, .has_embedding = false});
  std::set<std::string> never, pinned;
  for (const UnitSpec& unit : graph.units) {
    if (unit.rebuild == Rebuild::kNever) never.insert(unit.name);
    if (unit.pinned) pinned.insert(unit.name);
  }
  const std::set<std::string> routing = {"layer1.router_probs", "layer1.routing_map",
                                         "layer1.row_map",      "layer2.router_probs",
                                         "layer2.routing_map",  "layer2.row_map"};
  EXPECT_EQ(pinned, routing);
  std::set<std::string> expected = routing;
  expected.insert({"stage_recv.out", "layer1.rows", "layer1.row_probs", "layer1.hidden_out",
                   "layer2.rows", "layer2.row_probs", "layer2.hidden_out"});
  EXPECT_EQ(never, expected);
  ASSERT_EQ(graph.gates.size(), 2u);
  EXPECT_EQ(graph.gates[1].layer, 1) << "loads count the stage's layers from 0";
}

TEST(MegatronGraph, RecomputingQueriesStartsAtTheLatent) {
  const Graph graph = build_megatron_graph(preset("deepseek-v3"), deepseek_layer());
  const OpSpec& rope = graph.ops[graph.find_op("layer10.q_rope")];
  ASSERT_EQ(rope.reads.size(), 1u);
  const StorageSpec& raw = graph.storages[rope.reads.front()];
  EXPECT_EQ(raw.name, "layer10.q_up.out");
  EXPECT_EQ(raw.unit, -1);
  EXPECT_EQ(graph.ops[raw.producer].reads,
            (std::vector<int>{graph.find_storage("layer10.q_normed")}));
  // k comes from two unsaved outputs, v from one of their producers.
  const OpSpec& k_rope = graph.ops[graph.find_op("layer10.k_rope")];
  EXPECT_EQ(k_rope.reads, (std::vector<int>{graph.find_storage("layer10.kv_up.out"),
                                            graph.find_storage("layer10.kv_down.out")}));
  EXPECT_EQ(graph.units[graph.find_unit("layer10.v")].producer, graph.find_op("layer10.kv_up"));
}

TEST(MegatronGraph, GroupedQueriesKeepTheInputsOfTheirNorms) {
  ModelSpec spec = small_moe_spec();  // T = 16, heads 4 x 16, kv 2 x 16
  const auto plain = activations(build_megatron_graph(spec, {.seq = 16, .ep_size = 4}), {}, true);
  EXPECT_EQ(plain.at("layer0.q"), 16 * 64 * 2);
  EXPECT_EQ(plain.at("layer0.k"), 16 * 32 * 2);
  EXPECT_EQ(plain.at("layer0.v"), 16 * 32 * 2);
  EXPECT_EQ(plain.count("layer0.q_raw"), 0u);
  spec.qk_norm = true;
  const auto normed = activations(build_megatron_graph(spec, {.seq = 16, .ep_size = 4}), {}, true);
  EXPECT_EQ(normed.at("layer0.q_raw"), 16 * 64 * 2);
  EXPECT_EQ(normed.at("layer0.k_raw"), 16 * 32 * 2);
  EXPECT_EQ(normed.at("layer0.q_rstd"), 16 * 4 * 4);
}

TEST(MegatronGraph, TheHeadKeepsItsSoftmax) {
  const ModelSpec spec = small_moe_spec();  // vocabulary 64
  const Graph graph = build_megatron_graph(spec, {.seq = 16});
  EXPECT_EQ(activations(graph, {}, true).at("loss.softmax"), 16 * 64 * 4);
  EXPECT_EQ(activations(graph, {}, false).at("lm_head.out"), 16 * 64 * 2);
  EXPECT_EQ(graph.find_op("stage_send"), -1);
}

TEST(MegatronGraph, Fp8TwinsAreStoragesThatOnlyTheirOriginalRestores) {
  const Graph graph = build_megatron_graph(rich_moe_spec(), {.ep_size = 4, .fp8_twins = true});
  std::set<std::string> twins;
  for (const StorageSpec& storage : graph.storages) {
    if (storage.derived_from < 0) continue;
    if (storage.layer == 1) twins.insert(storage.name);
    const OpSpec& cast = graph.ops[storage.producer];
    EXPECT_EQ(cast.reads, (std::vector<int>{storage.derived_from})) << storage.name;
    EXPECT_FALSE(cast.has_backward);
    EXPECT_EQ(graph.storages[storage.derived_from].derived_from, -1) << storage.name;
  }
  EXPECT_EQ(twins, (std::set<std::string>{"layer1.normed_attn_fp8", "layer1.normed_mlp_fp8",
                                          "layer1.shared_act.out_fp8", "layer1.rows_fp8",
                                          "layer1.moe_act.out_fp8"}));
  // Hidden 32: 32 bytes and one scale of 4 per row.
  const StorageSpec& rows = graph.storages[graph.find_storage("layer1.rows_fp8")];
  EXPECT_EQ(rows.bytes, (ByteFormula{.per_row = 36}));
  EXPECT_EQ(graph.ops[rows.producer].kind, OpKind::kRowCast);
  EXPECT_EQ(graph.units[rows.unit].rebuild, Rebuild::kOp);
  EXPECT_EQ(graph.find_storage("layer1.d_rows_fp8"), -1) << "gradients go to the original";
  EXPECT_GE(graph.find_storage("layer1.d_rows"), 0);
}

TEST(MegatronGraph, AloneItsRowsAreAGather) {
  const Graph graph = build_megatron_graph(small_moe_spec(), {.seq = 16, .gate_at_combine = true});
  EXPECT_EQ(graph.find_op("layer0.dispatch"), -1);
  EXPECT_EQ(graph.find_op("layer0.combine"), -1);
  EXPECT_EQ(graph.units[graph.find_unit("layer0.rows")].rebuild, Rebuild::kOp);
  EXPECT_EQ(graph.units[graph.find_unit("layer0.expert_fc2.out")].rebuild, Rebuild::kOp);
  for (const OpSpec& op : graph.ops) EXPECT_EQ(op.stream, Stream::kCompute) << op.name;
}

TEST(MegatronGraph, OneGradientFollowsTheResidualStream) {
  const Graph graph = build_megatron_graph(
      rich_moe_spec(), {.ep_size = 4, .has_embedding = false, .has_head = false});
  const int gradient = graph.ops[graph.find_op("stage_send")].bwd_creates.front();
  for (const char* op : {"layer2.mlp_bda", "layer2.attn_norm", "layer0.mlp_norm", "stage_recv"}) {
    const auto& reads = graph.ops[graph.find_op(op)].bwd_reads;
    EXPECT_NE(std::find(reads.begin(), reads.end(), gradient), reads.end()) << op;
  }
  EXPECT_EQ(graph.storages[gradient].name, "layer2.d_hidden_out");
  EXPECT_EQ(graph.find_storage("layer0.d_hidden_out"), -1);
}

TEST(Graph, RefusesARebuildThroughACollectiveOrPastItsInputs) {
  const Graph good = build_megatron_graph(small_moe_spec(), {.seq = 16, .ep_size = 4});
  Graph graph = good;
  // Made by mlp_bda from moe_out, made from combine.returned, which a collective made.
  graph.units[graph.find_unit("layer0.hidden_out")].rebuild = Rebuild::kOp;
  EXPECT_THROW(graph.finalize(), InternalError);
  graph = good;
  // q, made from normed_attn through the unsaved qkv.out, is read again below the last backward
  // that reads normed_attn: it would be gone.
  graph.ops[graph.find_op("layer0.qkv")].bwd_saved.clear();
  graph.ops[graph.find_op("layer0.core_attn")].bwd_saved.push_back(
      graph.find_storage("layer0.normed_attn"));
  graph.ops[graph.find_op("layer0.q_rope")].bwd_saved = {graph.find_storage("layer0.q")};
  EXPECT_THROW(graph.finalize(), InternalError);
}

// finalize() checks every closure; here on every preset, at its first, a middle and its last
// layers.
TEST(MegatronGraph, EveryPresetIsAGraphUnderEveryOption) {
  for (const char* name : {"tiny", "mixtral-8x22b", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2"}) {
    const ModelSpec spec = preset(name);
    for (int options = 0; options < 8; ++options) {
      for (const int64_t first : {int64_t{0}, spec.layers / 2, spec.layers - 1}) {
        const Graph graph = build_megatron_graph(spec, {.seq = 64,
                                                        .ep_size = options & 1 ? 8 : 1,
                                                        .first_layer = first,
                                                        .layer_count = 1,
                                                        .has_embedding = first == 0,
                                                        .has_head = first == spec.layers - 1,
                                                        .gate_at_combine = (options & 2) != 0,
                                                        .fp8_twins = (options & 4) != 0});
        EXPECT_EQ(graph.layers, 1);
        EXPECT_EQ(graph.gates.size(), spec.is_moe(first) ? 1u : 0u) << name << first;
      }
    }
  }
}

/// A planned layer of the rich model (layer 1 has experts): 64 tokens, hidden 32.
Job planned_job(const std::string& layout) {
  Job job;
  job.model = rich_moe_spec();
  job.layout = parse_layout(layout, "test", "layout");
  job.stages = default_stages(job.model, 1, 1);
  job.seq = 64;
  return job;
}

std::map<std::string, int64_t> planned_saved(const Job& job, int64_t layer, int64_t rows) {
  MegatronGraphOptions options = megatron_options(job);
  options.first_layer = layer;
  return activations(build_megatron_graph(job.model, options), {.rows = rows}, true);
}

// Hidden 32, 4 query and 2 key heads of 16, shared width, all bf16; tokens * width * 2 bytes.
TEST(MegatronGraph, TensorAndSequenceParallelismDivideWhatTheyOwn) {
  const auto whole = planned_saved(planned_job("tp=1,ep=4,dp=4"), 1, 128);
  const auto split = planned_saved(planned_job("tp=2,ep=4,dp=4"), 1, 128);
  const auto heads = planned_saved(planned_job("tp=2,sp=0,ep=4,dp=4"), 1, 128);
  for (const char* name : {"layer1.normed_attn", "layer1.hidden_mid", "layer1.normed_mlp",
                           "stage_recv.out", "layer1.router_probs", "layer1.row_map"}) {
    EXPECT_EQ(split.at(name), whole.at(name) / 2) << name;
    EXPECT_EQ(heads.at(name), whole.at(name)) << name;
  }
  for (const char* name : {"layer1.q", "layer1.k", "layer1.v", "layer1.attn_out",
                           "layer1.shared_fc1.out", "layer1.shared_act.out"}) {
    EXPECT_EQ(split.at(name), whole.at(name) / 2) << name;
    EXPECT_EQ(heads.at(name), whole.at(name) / 2) << name;
  }
  EXPECT_EQ(split.at("layer1.expert_fc1.out"), whole.at("layer1.expert_fc1.out"));
  const auto experts = planned_saved(planned_job("tp=2,ep=2,etp=2,dp=4"), 1, 128);
  EXPECT_EQ(experts.at("layer1.expert_fc1.out"), whole.at("layer1.expert_fc1.out") / 2);
  EXPECT_EQ(experts.at("layer1.rows"), whole.at("layer1.rows")) << "whole rows, gathered over etp";
}

// Two key-value heads on four tp ranks: each rank has one.
TEST(MegatronGraph, KeyHeadsAreSharedWhereThereAreFewerThanRanks) {
  const auto saved = planned_saved(planned_job("tp=4,ep=4,dp=4"), 1, 128);
  EXPECT_EQ(saved.at("layer1.q"), 64 * 16 * 2);
  EXPECT_EQ(saved.at("layer1.k"), 64 * 16 * 2);
}

TEST(MegatronGraph, FP8KeepsTheCopyInPlaceOfTheOriginal) {
  Job job = planned_job("tp=1,ep=4,dp=4");
  job.fp8 = true;
  const auto saved = planned_saved(job, 1, 128);
  EXPECT_EQ(saved.count("layer1.rows"), 0u);
  EXPECT_EQ(saved.at("layer1.rows_fp8"), 128 * (32 + 4)) << "a byte per element, a scale per 128";
  EXPECT_EQ(saved.count("layer1.normed_attn"), 0u);
  EXPECT_EQ(saved.count("layer1.normed_mlp"), 1u) << "the router reads it in bf16";
}

// Top-2 of 8 experts over 4 ranks, 64 tokens: 128 rows when balanced. Capacity 1.25: 20 rows per
// expert and rank, 2 experts here, 4 senders.
TEST(MegatronGraph, CapacityBoundsTheRowsAndPaddingFixesThem) {
  Job job = planned_job("tp=1,ep=4,dp=4");
  EXPECT_EQ(expert_rows(job, 1), 128);
  EXPECT_EQ(expert_rows(job, 2.5), 320);
  job.moe.capacity_factor = 1.25;
  EXPECT_EQ(expert_rows(job, 1), 128);
  EXPECT_EQ(expert_rows(job, 2.5), 160);
  job.moe.pad_to_capacity = true;
  EXPECT_EQ(expert_rows(job, 0.5), 160);
}

TEST(MegatronGraph, LossesKeepLogitsInTheirOwnWay) {
  Job job = planned_job("tp=2,ep=4,dp=4");
  const auto head = [&](CrossEntropy loss) {
    job.cross_entropy = loss;
    return activations(build_megatron_head(job.model, megatron_options(job)), {}, true);
  };
  const int64_t logits = 64 * job.padded_vocab() / 2;
  EXPECT_EQ(head(CrossEntropy::kUnfused).at("loss.softmax"), logits * 4);
  EXPECT_EQ(head(CrossEntropy::kFusedTe).at("lm_head.out"), logits * 2) << "the gradient in place";
  EXPECT_EQ(head(CrossEntropy::kFusedTe).count("loss.softmax"), 0u);
}

TEST(MegatronGraph, RefusesWhatDoesNotFitTheModel) {
  const auto refused = [](const MegatronGraphOptions& options) {
    try {
      build_megatron_graph(small_moe_spec(), options);
    } catch (const InvalidInput& error) {
      return error.field();
    }
    return std::string();
  };
  EXPECT_EQ(refused({.first_layer = 2}), "first_layer");
  EXPECT_EQ(refused({.first_layer = 1, .layer_count = 2}), "layer_count");
  EXPECT_EQ(refused({.layer_count = -1}), "layer_count");
  EXPECT_EQ(refused({.ep_size = 3}), "ep_size");
  EXPECT_EQ(refused({.seq = 0}), "seq");
  EXPECT_EQ(refused({.first_layer = 1}), "");
}

TEST(NativeGraph, RefusesLatentAttention) {
  try {
    build_native_graph(preset("deepseek-v3"), {.seq = 16});
    ADD_FAILURE() << "accepted";
  } catch (const InvalidInput& error) {
    EXPECT_EQ(error.found(), "latent attention (MLA)");
  }
}

}  // namespace
}  // namespace bagualu
