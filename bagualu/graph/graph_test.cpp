#include "bagualu/graph/graph.h"

#include <gtest/gtest.h>

#include "bagualu/base/error.h"
#include "bagualu/graph/native_moe.h"
#include "bagualu/graph/native_workspace.h"
#include "bagualu/graph/test_models.h"

namespace bagualu {
namespace {

int64_t bytes_of(const Graph& graph, std::string_view storage, const LayerLoad& load) {
  const int s = graph.find_storage(storage);
  EXPECT_GE(s, 0) << storage;
  return s < 0 ? -1 : graph.storages[s].bytes.eval(graph.tokens, load);
}

int64_t unit_bytes(const Graph& graph, std::string_view name, const LayerLoad& load) {
  int64_t sum = 0;
  for (int s : graph.units[graph.find_unit(name)].storages) {
    sum += graph.storages[s].bytes.eval(graph.tokens, load);
  }
  return sum;
}

TEST(ByteFormula, RoundsTheSumUpToTheGranularity) {
  const ByteFormula formula = {.fixed = 1, .per_token = 2, .per_row = 3, .per_piece_row = 4};
  // 1 + 2 * 10 + 3 * 20 + 4 * 5 = 101, in blocks of 64.
  EXPECT_EQ(formula.eval(10, {.rows = 20, .piece_rows = 5}), 128);
  EXPECT_EQ(ByteFormula{}.eval(10, {.rows = 20}), 0);
}

TEST(Workspace, IsTheLargestPhasePlusHiddenBytes) {
  const Workspace workspace = {.phases = {{{.fixed = 64}, {.fixed = 65}}, {{.per_token = 64}}},
                               .hidden_bytes = 10};
  EXPECT_EQ(workspace.eval(2, {}), 64 + 128 + 10);  // first phase: two buffers alive together
  EXPECT_EQ(workspace.eval(4, {}), 256 + 10);
}

TEST(NativeGraph, SmallModelHasTheHandComputedBytes) {
  // T = 2 * 16 = 32 tokens, h 32, heads 4 x 16, kv 2 x 16, E 8, k 2, f 48, fp32.
  const Graph graph =
      build_native_graph(small_moe_spec(), {.micro_batch_size = 2, .seq = 16, .ep_size = 4});
  const LayerLoad load = {.rows = 70, .piece_rows = 24};
  EXPECT_EQ(bytes_of(graph, "embedding.out", load), 32 * 32 * 4);
  EXPECT_EQ(bytes_of(graph, "layer0.normed_attn", load), 32 * 32 * 4);
  EXPECT_EQ(bytes_of(graph, "layer0.rstd_attn", load), 32 * 4);
  EXPECT_EQ(bytes_of(graph, "layer0.qkv", load), 32 * 128 * 4);
  EXPECT_EQ(bytes_of(graph, "layer0.attn_out", load), 32 * 64 * 4);
  EXPECT_EQ(bytes_of(graph, "layer0.attn_lse", load), 32 * 4 * 4);
  EXPECT_EQ(bytes_of(graph, "layer0.router_logits", load), 32 * 8 * 4);
  EXPECT_EQ(bytes_of(graph, "layer0.topk_ids", load), 32 * 2 * 2);  // 16-bit ids
  EXPECT_EQ(bytes_of(graph, "layer0.topk_probs", load), 32 * 2 * 4);
  EXPECT_EQ(bytes_of(graph, "layer0.row_map", load), 32 * 2 * 4);
  EXPECT_EQ(bytes_of(graph, "layer0.dispatch_send", load), 32 * 2 * (32 * 4 + 4));
  // 70 rows of 132 bytes = 9240, rounded up to 9280.
  EXPECT_EQ(bytes_of(graph, "layer0.dispatch_recv", load), 9280);
  EXPECT_EQ(bytes_of(graph, "layer0.rows", load), 70 * 32 * 4);
  EXPECT_EQ(bytes_of(graph, "layer0.row_probs", load), 320);  // 280 rounded up
  EXPECT_EQ(bytes_of(graph, "layer0.expert_fc1.out", load), 70 * 96 * 4);
  EXPECT_EQ(bytes_of(graph, "layer0.moe_act.out", load), 70 * 48 * 4);
  EXPECT_EQ(bytes_of(graph, "layer1.hidden_out", load), 32 * 32 * 4);
  EXPECT_EQ(bytes_of(graph, "log_probs", load), 32 * 64 * 4);
  const StorageSpec& fc1 = graph.storages[graph.find_storage("layer0.expert_fc1.out")];
  EXPECT_EQ(fc1.piece_bytes.eval(graph.tokens, load), 24 * 96 * 4);
}

TEST(NativeGraph, WithoutExchangeTheRowsAreAGatherAndMayBeRecomputed) {
  const Graph alone = build_native_graph(small_moe_spec(), {.seq = 16});
  EXPECT_EQ(alone.find_op("layer0.dispatch"), -1);
  EXPECT_EQ(alone.units[alone.find_unit("layer0.dispatch")].rebuild, Rebuild::kOp);
  const Graph four = build_native_graph(small_moe_spec(), {.seq = 16, .ep_size = 4});
  EXPECT_GE(four.find_op("layer0.dispatch"), 0);
  EXPECT_EQ(four.units[four.find_unit("layer0.dispatch")].rebuild, Rebuild::kNever);
}

TEST(NativeGraph, OnlyRoutingResultsArePinned) {
  const Graph graph = build_native_graph(rich_moe_spec(), {.seq = 16, .ep_size = 4});
  for (const UnitSpec& unit : graph.units) {
    EXPECT_EQ(unit.pinned, unit.name.ends_with(".router")) << unit.name;
  }
  EXPECT_EQ(graph.gates.size(), 2u);  // layer 0 is dense
  EXPECT_EQ(graph.gates[0].layer, 1);
}

TEST(NativeGraph, FeaturesAddTheirOperators) {
  const Graph graph = build_native_graph(rich_moe_spec(), {.seq = 16, .ep_size = 4});
  for (const char* op :
       {"layer0.qk_norm", "layer0.mlp_fc2", "layer1.shared_act", "layer2.combine"}) {
    EXPECT_GE(graph.find_op(op), 0) << op;
  }
  EXPECT_GE(graph.find_storage("layer1.d_moe_out"), 0);  // dropout masks the branch's gradient
  EXPECT_EQ(graph.find_op("layer0.experts"), -1);
}

// One MoE layer of hidden 2048, expert FFN 768, top-8 of 128, bf16, 4096 tokens on each of 8 ranks:
// balanced, a rank receives 8 * 4096 * 8 / 8 = 32,768 rows. Kept for the experts' backward are
// 2h + 2 * 3f bytes per row, 4096 + 4608 = 8704, that is 272 MiB; at load factor 2.5 it is 680 MiB,
// and all tokens on this rank (factor 8) make 2176 MiB.
TEST(NativeGraph, ExpertBytesFollowTheRowsLinearly) {
  ModelSpec spec = small_moe_spec();
  spec.hidden = 2048;
  spec.expert_ffn = 768;
  spec.experts = 128;
  spec.top_k = 8;
  const NativeGraphOptions options = {
      .micro_batch_size = 1, .seq = 4096, .dtype = Dtype::kBf16, .ep_size = 8};
  const auto expert_mib = [](const Graph& graph, int64_t rows) {
    const LayerLoad load = {.rows = rows, .piece_rows = 4096};
    const int64_t bytes = bytes_of(graph, "layer0.rows", load) +
                          unit_bytes(graph, "layer0.expert_fc1", load) +
                          unit_bytes(graph, "layer0.moe_act", load);
    return static_cast<double>(bytes) / (1 << 20);
  };
  const Graph graph = build_native_graph(spec, options);
  EXPECT_EQ(expert_mib(graph, 32768), 272.0);
  EXPECT_EQ(expert_mib(graph, 32768 * 5 / 2), 680.0);
  EXPECT_EQ(expert_mib(graph, 32768 * 8), 2176.0);
  spec.experts = 64;  // bytes depend on the rows, not on the number of experts
  EXPECT_EQ(expert_mib(build_native_graph(spec, options), 32768), 272.0);
}

TEST(NativeGraph, AttentionScratchMatchesTheMeasuredBytes) {
  ModelSpec spec = small_moe_spec();
  const auto scratch = [&](int64_t seq, int64_t head_dim, int64_t threads) {
    spec.head_dim = head_dim;
    return attention_forward_hidden_bytes(spec, {.seq = seq, .threads = threads});
  };
  // A tile of 32 x 128 scores, 2 x 32 statistics, 32 x 32 outputs: 5184 floats.
  EXPECT_EQ(scratch(128, 32, 1), 20736);
  EXPECT_EQ(scratch(256, 32, 1), 74240);
  EXPECT_EQ(scratch(1024, 64, 1), 591872);
  EXPECT_EQ(scratch(128, 32, 3), 3 * 20736);
}

TEST(Graph, FinalizeRefusesWhatBreaksItsInvariants) {
  const Graph good = build_native_graph(small_moe_spec(), {.seq = 16, .ep_size = 4});
  Graph graph = good;
  EXPECT_NO_THROW(graph.finalize());
  graph.ops[1].reads = {graph.find_storage("log_probs")};  // created later
  EXPECT_THROW(graph.finalize(), InternalError);
  graph = good;
  graph.ops.back().bwd_saved.clear();  // saved, but read by no backward
  EXPECT_THROW(graph.finalize(), InternalError);
  graph = good;
  graph.ops[2].creates = graph.ops[1].creates;  // created twice
  EXPECT_THROW(graph.finalize(), InternalError);
}

TEST(Graph, UnknownNamesAreMinusOne) {
  const Graph graph = build_native_graph(small_moe_spec(), {.seq = 16});
  EXPECT_EQ(graph.find_op("x"), -1);
  EXPECT_EQ(graph.find_unit("x"), -1);
  EXPECT_EQ(graph.find_storage("x"), -1);
}

}  // namespace
}  // namespace bagualu
