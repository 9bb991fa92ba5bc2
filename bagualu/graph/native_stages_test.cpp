// Pipeline stages and split backwards of the native graph.
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

constexpr LayerLoad kLoad = {.rows = 70, .piece_rows = 24};

ModelSpec deep(ModelSpec spec) {
  spec.layers = 4;
  spec.moe_layer = {static_cast<uint8_t>(spec.dense_ffn == 0), 1, 1, 1};
  return spec;
}

std::vector<ModelSpec> models() {
  ModelSpec rich_without_dropout = rich_moe_spec();
  rich_without_dropout.dropout = 0;
  return {deep(small_moe_spec()), deep(rich_moe_spec()), deep(rich_without_dropout)};
}

std::vector<std::vector<int64_t>> splits() {
  return {{4}, {2, 2}, {3, 1}, {0, 4}, {4, 0}, {1, 1, 1, 1}, {0, 1, 3, 0}};
}

NativeGraphOptions options_of(Dtype dtype, int64_t ep_size, bool split) {
  return {.micro_batch_size = 2,
          .seq = 16,
          .dtype = dtype,
          .ep_size = ep_size,
          .stage = {},
          .split_weight_grads = split};
}

std::vector<Graph> stages(const ModelSpec& spec, NativeGraphOptions options,
                          const std::vector<int64_t>& layers) {
  std::vector<Graph> graphs;
  int64_t first = 0;
  for (size_t s = 0; s < layers.size(); ++s) {
    options.stage = StageSlice{first, layers[s], s == 0, s + 1 == layers.size()};
    graphs.push_back(build_native_graph(spec, options));
    first += layers[s];
  }
  return graphs;
}

template <class F>
void for_all(F&& f) {
  for (const ModelSpec& spec : models()) {
    for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
      for (const int64_t ep : {1, 4}) {
        for (const bool split : {false, true}) {
          for (const auto& layers : splits()) f(spec, options_of(dtype, ep, split), layers);
        }
      }
    }
  }
}

// Name -> bytes of the storages that `keep` accepts, all stages together.
template <class Keep>
std::multimap<std::string, int64_t> bytes_of(const std::vector<Graph>& graphs, Keep&& keep) {
  std::multimap<std::string, int64_t> bytes;
  for (const Graph& graph : graphs) {
    for (const StorageSpec& s : graph.storages) {
      if (keep(s)) bytes.emplace(s.name, s.bytes.eval(graph.tokens, kLoad));
    }
  }
  return bytes;
}

int64_t sum(const std::multimap<std::string, int64_t>& bytes) {
  int64_t total = 0;
  for (const auto& [name, b] : bytes) total += b;
  return total;
}

TEST(StageGraph, StagesTogetherAreTheModelsOperators) {
  for_all([](const ModelSpec& spec, const NativeGraphOptions& options,
             const std::vector<int64_t>& layers) {
    std::vector<std::string> whole, parts;
    for (const OpSpec& op : build_native_graph(spec, options).ops) whole.push_back(op.name);
    for (const Graph& graph : stages(spec, options, layers)) {
      for (const OpSpec& op : graph.ops) {
        if (op.kind != OpKind::kStageRecv && op.kind != OpKind::kStageSend) {
          parts.push_back(op.name);
        }
      }
    }
    EXPECT_EQ(parts, whole);
  });
}

// What backward keeps is the same bytes under any split: where a stage ends, the receiver saves the
// stream that the sender does not.
TEST(StageGraph, StagesTogetherSaveTheModelsBytes) {
  const auto saved = [](const StorageSpec& s) { return s.unit >= 0; };
  for_all([&](const ModelSpec& spec, const NativeGraphOptions& options,
              const std::vector<int64_t>& layers) {
    auto whole = bytes_of({build_native_graph(spec, options)}, saved);
    auto parts = bytes_of(stages(spec, options, layers), saved);
    EXPECT_EQ(sum(parts), sum(whole));
    EXPECT_EQ(parts.count("stage_recv.out"), layers.size() - 1);
    EXPECT_EQ(parts.size(), whole.size());
    parts.erase("stage_recv.out");
    for (const auto& [name, bytes] : parts) {
      const auto found = whole.find(name);
      ASSERT_NE(found, whole.end()) << name;
      EXPECT_EQ(found->second, bytes) << name;
      whole.erase(found);
    }
    for (const auto& [name, bytes] : whole) {  // the outputs of the last layers of the stages
      EXPECT_TRUE(name == "embedding.out" || name.ends_with(".hidden_out")) << name;
    }
  });
}

TEST(StageGraph, EachStageHasOneGradientOfTheStreamAndItsLayersOthers) {
  const auto gradient = [](const StorageSpec& s) {
    return s.kind == StorageKind::kGradient && s.name != "d_hidden";
  };
  for_all([&](const ModelSpec& spec, const NativeGraphOptions& options,
              const std::vector<int64_t>& layers) {
    const std::vector<Graph> graphs = stages(spec, options, layers);
    EXPECT_EQ(bytes_of(graphs, gradient), bytes_of({build_native_graph(spec, options)}, gradient));
    for (const Graph& graph : graphs) EXPECT_GE(graph.find_storage("d_hidden"), 0);
  });
}

TEST(StageGraph, NumbersLayersFromZeroAndNamesThemAsTheModelDoes) {
  const std::vector<Graph> graphs =
      stages(deep(rich_moe_spec()), options_of(Dtype::kFp32, 4, false), {1, 3});
  const Graph& last = graphs[1];
  EXPECT_EQ(last.layers, 3);
  EXPECT_EQ(last.first_layer, 1);
  EXPECT_EQ(last.ops[last.find_op("layer3.qkv")].layer, 2);
  EXPECT_EQ(last.storages[last.find_storage("layer1.qkv")].layer, 0);
  EXPECT_EQ(last.find_op("layer0.qkv"), -1);
  ASSERT_EQ(last.gates.size(), 3u);
  EXPECT_EQ(last.gates[0].layer, 0);
  EXPECT_EQ(last.ops[last.gates[0].op].name, "layer1.router");
  EXPECT_TRUE(graphs[0].gates.empty());  // layer 0 is dense
}

TEST(StageGraph, ReceivesAndSendsTheStreamAndItsGradient) {
  const std::vector<Graph> graphs =
      stages(deep(small_moe_spec()), options_of(Dtype::kFp32, 1, false), {2, 1, 1});
  const Graph& middle = graphs[1];
  const OpSpec& recv = middle.ops.front();
  const OpSpec& send = middle.ops.back();
  EXPECT_EQ(recv.kind, OpKind::kStageRecv);
  EXPECT_EQ(send.kind, OpKind::kStageSend);
  EXPECT_EQ(recv.stream, Stream::kComm);
  EXPECT_EQ(send.stream, Stream::kComm);
  const int d_hidden = middle.find_storage("d_hidden");
  EXPECT_EQ(recv.creates, std::vector<int>{middle.find_storage("stage_recv.out")});
  EXPECT_EQ(recv.bwd_reads, std::vector<int>{d_hidden});
  EXPECT_EQ(send.reads, std::vector<int>{middle.find_storage("layer2.hidden_out")});
  EXPECT_EQ(send.bwd_creates, std::vector<int>{d_hidden});
  EXPECT_EQ(middle.last_backward_read[d_hidden], 0);  // lives until it is sent on
  EXPECT_EQ(middle.units[middle.find_unit("stage_recv")].rebuild, Rebuild::kNever);
  EXPECT_EQ(middle.storages[send.reads[0]].unit, -1);  // gone when it was sent
  EXPECT_EQ(graphs[0].ops.front().kind, OpKind::kEmbedding);
  EXPECT_EQ(graphs[2].ops.back().kind, OpKind::kLmHead);
}

TEST(StageGraph, RefusesLayersThatTheModelDoesNotHave) {
  NativeGraphOptions options = options_of(Dtype::kFp32, 1, false);
  options.stage = StageSlice{3, 2, false, true};
  EXPECT_THROW(build_native_graph(deep(small_moe_spec()), options), InternalError);
  options.stage = StageSlice{2, 0, false, false};
  EXPECT_THROW(build_native_graph(deep(small_moe_spec()), options), InternalError);
}

TEST(SplitBackward, CoversTheOperatorsWithWeights) {
  const Graph graph = build_native_graph(deep(rich_moe_spec()), options_of(Dtype::kFp32, 4, true));
  const std::set<OpKind> split = {OpKind::kQkv,     OpKind::kAttnProj,  OpKind::kRouter,
                                  OpKind::kExperts, OpKind::kSharedFc1, OpKind::kSharedFc2,
                                  OpKind::kMlpFc1,  OpKind::kMlpFc2};
  for (const OpSpec& op : graph.ops) EXPECT_EQ(op.has_wgrad, split.contains(op.kind)) << op.name;
  for (const OpSpec& op :
       build_native_graph(deep(rich_moe_spec()), options_of(Dtype::kFp32, 4, false)).ops) {
    EXPECT_FALSE(op.has_wgrad) << op.name;
  }
}

std::vector<std::string> deferred_of(const ModelSpec& spec, std::string_view layer) {
  const Graph graph = build_native_graph(spec, options_of(Dtype::kFp32, 4, true));
  std::vector<std::string> names;
  for (const StorageSpec& s : graph.storages) {
    if (s.deferred_only && s.name.starts_with(layer)) names.push_back(s.name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

// d_hidden is updated in place below every operator that adds to the stream, so its value is copied
// there. With dropout a shared expert's output gradient is a storage anyway.
TEST(SplitBackward, CopiesWhatIsUpdatedInPlaceLater) {
  using Names = std::vector<std::string>;
  const std::vector<ModelSpec> all = models();
  const ModelSpec &with_dropout = all[1], &without = all[2];
  EXPECT_EQ(deferred_of(without, "layer0"), (Names{"layer0.d_attn_proj", "layer0.d_mlp_fc2"}));
  EXPECT_EQ(deferred_of(without, "layer1"), (Names{"layer1.d_attn_proj", "layer1.d_expert_fc1",
                                                   "layer1.d_expert_out", "layer1.d_shared_fc2"}));
  EXPECT_EQ(deferred_of(with_dropout, "layer1"),
            (Names{"layer1.d_attn_proj", "layer1.d_expert_fc1", "layer1.d_expert_out"}));
}

TEST(SplitBackward, HasTheHandComputedBytes) {
  // T = 32, h 32, f 48, 70 rows, fp32 and bf16.
  for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
    const int64_t e = dtype_bytes(dtype);
    const Graph graph = build_native_graph(deep(small_moe_spec()), options_of(dtype, 4, true));
    const auto bytes = [&](const char* name) {
      return graph.storages[graph.find_storage(name)].bytes.eval(graph.tokens, kLoad);
    };
    EXPECT_EQ(bytes("layer1.d_attn_proj"), 32 * 32 * e);
    EXPECT_EQ(bytes("layer1.d_expert_fc1"), 70 * 96 * e);
    EXPECT_EQ(bytes("layer1.d_expert_out"), 70 * 32 * e);
    // Workspaces: pieces of 24 rows; bf16 temporaries of weight gradients, of the logits' gradient.
    const bool bf16 = dtype == Dtype::kBf16;
    const auto op = [&](const char* name) { return graph.ops[graph.find_op(name)]; };
    const auto of_input = [&](const char* name) {
      return op(name).input_grad_workspace.eval(graph.tokens, kLoad);
    };
    const auto of_weight = [&](const char* name) {
      return op(name).wgrad_workspace.eval(graph.tokens, kLoad);
    };
    const int64_t gate_piece = 128;  // 24 fp32 in whole lines
    EXPECT_EQ(of_input("layer1.experts"), 24 * 32 * e + 24 * 48 * e + gate_piece);
    EXPECT_EQ(of_weight("layer1.experts"), bf16 ? 96 * 32 * 2 : 0);
    EXPECT_EQ(of_input("layer1.router"), bf16 ? 32 * 8 * 2 : 0);
    EXPECT_EQ(of_weight("layer1.router"), bf16 ? 32 * 8 * 2 + 8 * 32 * 2 : 0);
    EXPECT_EQ(of_input("layer1.qkv"), 0);
    EXPECT_EQ(of_weight("layer1.qkv"), bf16 ? 128 * 32 * 2 : 0);
    EXPECT_EQ(of_weight("layer1.attn_proj"), bf16 ? 32 * 64 * 2 : 0);
  }
}

// Neither part needs more scratch than the whole backward, whose numbers do not change.
TEST(SplitBackward, PartsNeedNoMoreScratchThanTheWhole) {
  for_all([](const ModelSpec& spec, NativeGraphOptions options, const std::vector<int64_t>&) {
    options.split_weight_grads = true;
    const Graph split = build_native_graph(spec, options);
    options.split_weight_grads = false;
    const Graph whole = build_native_graph(spec, options);
    for (size_t i = 0; i < whole.ops.size(); ++i) {
      const OpSpec &a = split.ops[i], &b = whole.ops[i];
      const int64_t bytes = b.bwd_workspace.eval(whole.tokens, kLoad);
      EXPECT_EQ(a.bwd_workspace.eval(whole.tokens, kLoad), bytes) << a.name;
      EXPECT_LE(a.input_grad_workspace.eval(whole.tokens, kLoad), bytes) << a.name;
      EXPECT_LE(a.wgrad_workspace.eval(whole.tokens, kLoad), bytes) << a.name;
    }
  });
}

TEST(SplitBackward, FinalizeRefusesGradientsThatChangeBeforeTheyAreRead) {
  const Graph good = build_native_graph(deep(small_moe_spec()), options_of(Dtype::kFp32, 4, true));
  Graph graph = good;
  EXPECT_NO_THROW(graph.finalize());
  // d_hidden is updated by the norms below.
  graph.ops[graph.find_op("layer1.attn_proj")].wgrad_reads = {graph.find_storage("d_hidden")};
  EXPECT_THROW(graph.finalize(), InternalError);
  // A copy that exists only if deferred, read by another operator.
  graph = good;
  graph.ops[graph.find_op("layer1.core_attn")].bwd_reads.push_back(
      graph.find_storage("layer1.d_attn_proj"));
  EXPECT_THROW(graph.finalize(), InternalError);
  // A weight gradient of something that the backward does not have.
  graph = good;
  graph.ops[graph.find_op("layer1.qkv")].wgrad_saved = {graph.find_storage("layer1.attn_out")};
  EXPECT_THROW(graph.finalize(), InternalError);
}

}  // namespace
}  // namespace bagualu
