#include "bagualu/graph/native_moe.h"

#include <algorithm>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/graph/native_workspace.h"

namespace bagualu {
namespace {

constexpr int64_t kFp32Bytes = 4;
constexpr int64_t kIndexBytes = 4;   // row map
constexpr int64_t kExpertIdBytes = 2;  // ids are kept in 16 bits, E <= 65,536

ByteFormula per_token(int64_t bytes) { return {.per_token = bytes}; }
ByteFormula per_row(int64_t bytes) { return {.per_row = bytes}; }
ByteFormula per_piece_row(int64_t bytes) { return {.per_piece_row = bytes}; }

class Builder {
 public:
  Builder(const ModelSpec& spec, const NativeGraphOptions& options)
      : spec_(spec),
        options_(options),
        elem_(options.dtype == Dtype::kBf16 ? 2 : 4),
        slice_(options.stage.value_or(whole_model(spec))) {
    graph_.tokens = options.micro_batch_size * options.seq;
    graph_.layers = static_cast<int>(slice_.layers);
    graph_.first_layer = static_cast<int>(slice_.first_layer);
  }

  Graph build() {
    d_hidden_ = gradient("d_hidden", -1, per_token(spec_.hidden * elem_));
    if (slice_.embedding) {
      embedding();
    } else {
      stage_recv();
    }
    for (int layer = 0; layer < graph_.layers; ++layer) {
      attention(layer);
      if (spec_.is_moe(slice_.first_layer + layer)) {
        moe(layer);
      } else {
        dense_mlp(layer);
      }
    }
    if (slice_.head) {
      head();
    } else {
      stage_send();
    }
    set_native_workspaces(spec_, options_, graph_);
    graph_.finalize();
    return std::move(graph_);
  }

 private:
  std::string scoped(int layer, std::string_view name) const {
    return layer < 0 ? std::string(name)
                     : "layer" + std::to_string(slice_.first_layer + layer) + "." +
                           std::string(name);
  }

  // References to ops stay valid until the next op() call only.
  OpSpec& op(OpKind kind, int layer, Stream stream = Stream::kCompute) {
    OpSpec spec;
    spec.kind = kind;
    spec.name = scoped(layer, op_kind_name(kind));
    spec.layer = layer;
    spec.stream = stream;
    graph_.ops.push_back(std::move(spec));
    return graph_.ops.back();
  }

  int storage(std::string_view name, int layer, ByteFormula bytes,
              StorageKind kind = StorageKind::kActivation) {
    StorageSpec spec;
    spec.name = scoped(layer, name);
    spec.kind = kind;
    spec.layer = layer;
    spec.bytes = bytes;
    graph_.storages.push_back(std::move(spec));
    return static_cast<int>(graph_.storages.size()) - 1;
  }

  int gradient(std::string_view name, int layer, ByteFormula bytes) {
    return storage(name, layer, bytes, StorageKind::kGradient);
  }

  // A storage kept for backward, in the unit `unit_name` (made on first use).
  int saved(std::string_view name, int layer, ByteFormula bytes, std::string_view unit_name,
            Rebuild rebuild) {
    const int s = storage(name, layer, bytes);
    const std::string full = scoped(layer, unit_name);
    int u = graph_.find_unit(full);
    if (u < 0) {
      UnitSpec unit;
      unit.name = full;
      unit.layer = layer;
      unit.rebuild = rebuild;
      graph_.units.push_back(std::move(unit));
      u = static_cast<int>(graph_.units.size()) - 1;
    }
    graph_.units[u].storages.push_back(s);
    graph_.storages[s].unit = u;
    graph_.storages[s].lossy_element_bytes = elem_;
    return s;
  }

  // As saved(), for indices, gate weights and statistics: never rounded.
  int saved_exact(std::string_view name, int layer, ByteFormula bytes, std::string_view unit_name,
                  Rebuild rebuild) {
    const int s = saved(name, layer, bytes, unit_name, rebuild);
    graph_.storages[s].lossy_element_bytes = 0;
    return s;
  }

  // Splits the backward of the op: its weight gradient reads `input` and `gradient`.
  void split(OpSpec& op, int input, int gradient) const {
    if (!options_.split_weight_grads) return;
    op.has_wgrad = true;
    op.wgrad_saved = {input};
    op.wgrad_reads = {gradient};
  }

  // The same for an op whose output gradient is d_hidden, which ops further down update in place.
  // The copy is the gradient before the op's dropout.
  void split_with_copy(int op, int layer, int input) {
    if (!options_.split_weight_grads) return;
    const std::string name = "d_" + std::string(op_kind_name(graph_.ops[op].kind));
    const int copy = deferred(name, layer, per_token(spec_.hidden * elem_));
    graph_.ops[op].bwd_creates.push_back(copy);
    split(graph_.ops[op], input, copy);
  }

  int deferred(std::string_view name, int layer, ByteFormula bytes) {
    const int s = gradient(name, layer, bytes);
    graph_.storages[s].deferred_only = true;
    return s;
  }

  int last_op() const { return static_cast<int>(graph_.ops.size()) - 1; }

  // Of a stage that consists of it, the output leaves at once, and no backward reads it.
  void embedding() {
    const ByteFormula bytes = per_token(spec_.hidden * elem_);
    const bool leaves = slice_.layers == 0 && !slice_.head;
    hidden_ = leaves ? storage("embedding.out", -1, bytes)
                     : saved("embedding.out", -1, bytes, "embedding", Rebuild::kOp);
    OpSpec& embedding = op(OpKind::kEmbedding, -1);
    embedding.creates = {hidden_};
    embedding.bwd_reads = {d_hidden_};
  }

  void stage_recv() {
    hidden_ = saved("stage_recv.out", -1, per_token(spec_.hidden * elem_), "stage_recv",
                    Rebuild::kNever);
    OpSpec& recv = op(OpKind::kStageRecv, -1, Stream::kComm);
    recv.creates = {hidden_};
    recv.bwd_reads = {d_hidden_};
  }

  void stage_send() {
    OpSpec& send = op(OpKind::kStageSend, -1, Stream::kComm);
    send.reads = {hidden_};
    send.bwd_creates = {d_hidden_};
  }

  void attention(int layer) {
    const int64_t h = spec_.hidden;
    const int64_t q_width = spec_.heads * spec_.head_dim;
    const int64_t kv_width = spec_.kv_heads * spec_.head_dim;
    const int64_t qkv_width = q_width + 2 * kv_width;

    const int normed = saved("normed_attn", layer, per_token(h * elem_), "attn_norm", Rebuild::kOp);
    const int rstd = saved_exact("rstd_attn", layer, per_token(kFp32Bytes), "attn_norm", Rebuild::kOp);
    const int d_normed = gradient("d_normed_attn", layer, per_token(h * elem_));
    OpSpec& norm = op(OpKind::kAttnNorm, layer);
    norm.reads = {hidden_};
    norm.creates = {normed, rstd};
    norm.bwd_saved = {hidden_, rstd};
    norm.bwd_reads = {d_normed, d_hidden_};

    const int qkv = saved("qkv", layer, per_token(qkv_width * elem_), "qkv", Rebuild::kOp);
    const int d_qkv = gradient("d_qkv", layer, per_token(qkv_width * elem_));
    OpSpec& projection = op(OpKind::kQkv, layer);
    projection.reads = {normed};
    projection.creates = {qkv};
    projection.bwd_saved = {normed};
    projection.bwd_reads = {d_qkv};
    projection.bwd_creates = {d_normed};
    split(projection, normed, d_qkv);

    std::vector<int> attention_inputs = {qkv};
    if (spec_.qk_norm) {
      const int q = saved("q", layer, per_token(q_width * elem_), "qk_norm", Rebuild::kOp);
      const int k = saved("k", layer, per_token(kv_width * elem_), "qk_norm", Rebuild::kOp);
      const int q_rstd =
          saved_exact("q_rstd", layer, per_token(spec_.heads * kFp32Bytes), "qk_norm", Rebuild::kOp);
      const int k_rstd =
          saved_exact("k_rstd", layer, per_token(spec_.kv_heads * kFp32Bytes), "qk_norm", Rebuild::kOp);
      OpSpec& qk_norm = op(OpKind::kQkNorm, layer);
      qk_norm.reads = {qkv};
      qk_norm.creates = {q, k, q_rstd, k_rstd};
      qk_norm.bwd_saved = {qkv, q_rstd, k_rstd};
      qk_norm.bwd_reads = {d_qkv};
      attention_inputs = {qkv, q, k};
    }

    const int out = saved("attn_out", layer, per_token(q_width * elem_), "core_attn", Rebuild::kOp);
    const int lse =
        saved_exact("attn_lse", layer, per_token(spec_.heads * kFp32Bytes), "core_attn", Rebuild::kOp);
    const int d_out = gradient("d_attn_out", layer, per_token(q_width * elem_));
    OpSpec& core = op(OpKind::kCoreAttn, layer);
    core.reads = attention_inputs;
    core.creates = {out, lse};
    core.bwd_saved = attention_inputs;
    core.bwd_saved.insert(core.bwd_saved.end(), {out, lse});
    core.bwd_reads = {d_out};
    core.bwd_creates = {d_qkv};

    hidden_mid_ = saved("hidden_mid", layer, per_token(h * elem_), "attn_proj", Rebuild::kOp);
    OpSpec& proj = op(OpKind::kAttnProj, layer);
    proj.reads = {out, hidden_};
    proj.creates = {hidden_mid_};
    proj.bwd_saved = {out};
    proj.bwd_reads = {d_hidden_};
    proj.bwd_creates = {d_out};
    split_with_copy(last_op(), layer, out);

    normed_mlp_ = saved("normed_mlp", layer, per_token(h * elem_), "mlp_norm", Rebuild::kOp);
    const int rstd_mlp = saved_exact("rstd_mlp", layer, per_token(kFp32Bytes), "mlp_norm", Rebuild::kOp);
    d_normed_mlp_ = gradient("d_normed_mlp", layer, per_token(h * elem_));
    OpSpec& mlp_norm = op(OpKind::kMlpNorm, layer);
    mlp_norm.reads = {hidden_mid_};
    mlp_norm.creates = {normed_mlp_, rstd_mlp};
    mlp_norm.bwd_saved = {hidden_mid_, rstd_mlp};
    mlp_norm.bwd_reads = {d_normed_mlp_, d_hidden_};
  }

  // fc1 -> swiglu -> fc2 over the tokens themselves: the dense layers' MLP and the shared expert.
  struct GatedMlp {
    OpKind fc1, act, fc2;
    std::string name;
    int64_t ffn;
  };

  struct GatedMlpEnds {
    int act_out, d_act_out;
  };

  GatedMlpEnds gated_mlp_inner(int layer, const GatedMlp& mlp, bool creates_d_normed) {
    const std::string fc1_name = mlp.name + "_fc1", act_name = mlp.name + "_act";
    const int fc1_out =
        saved(fc1_name + ".out", layer, per_token(2 * mlp.ffn * elem_), fc1_name, Rebuild::kOp);
    const int act_out =
        saved(act_name + ".out", layer, per_token(mlp.ffn * elem_), act_name, Rebuild::kOp);
    const int d_fc1 = gradient("d_" + fc1_name, layer, per_token(2 * mlp.ffn * elem_));
    const int d_act_out = gradient("d_" + act_name, layer, per_token(mlp.ffn * elem_));
    OpSpec& fc1 = op(mlp.fc1, layer);
    fc1.reads = {normed_mlp_};
    fc1.creates = {fc1_out};
    fc1.bwd_saved = {normed_mlp_};
    fc1.bwd_reads = {d_fc1};
    (creates_d_normed ? fc1.bwd_creates : fc1.bwd_reads).push_back(d_normed_mlp_);
    split(fc1, normed_mlp_, d_fc1);
    OpSpec& act = op(mlp.act, layer);
    act.reads = {fc1_out};
    act.creates = {act_out};
    act.bwd_saved = {fc1_out};
    act.bwd_reads = {d_act_out};
    act.bwd_creates = {d_fc1};
    return {act_out, d_act_out};
  }

  void dense_mlp(int layer) {
    const auto [act_out, d_act_out] = gated_mlp_inner(
        layer, {OpKind::kMlpFc1, OpKind::kMlpAct, OpKind::kMlpFc2, "mlp", spec_.dense_ffn}, true);
    const int next = next_hidden(layer, "mlp_fc2");
    OpSpec& fc2 = op(OpKind::kMlpFc2, layer);
    fc2.reads = {act_out, hidden_mid_};
    fc2.creates = {next};
    fc2.bwd_saved = {act_out};
    fc2.bwd_reads = {d_hidden_};
    fc2.bwd_creates = {d_act_out};
    split_with_copy(last_op(), layer, act_out);
    hidden_ = next;
  }

  // A layer's output is where its neighbours meet: kept or offloaded, never recomputed (behind a
  // MoE layer that would repeat a collective; behind a dense one it would chain layers together).
  // The last one of a stage without head is sent away, and no backward here reads it.
  int next_hidden(int layer, std::string_view unit) {
    const ByteFormula bytes = per_token(spec_.hidden * elem_);
    if (layer + 1 == graph_.layers && !slice_.head) return storage("hidden_out", layer, bytes);
    return saved("hidden_out", layer, bytes, unit, Rebuild::kNever);
  }

  void moe(int layer) {
    const int64_t k = spec_.top_k;
    const bool exchange = options_.ep_size > 1;
    const int64_t wire_row = spec_.hidden * elem_ + kFp32Bytes;  // a row and its gate weight

    const int d_probs = gradient("d_topk_probs", layer, per_token(k * kFp32Bytes));
    const Routing routing = router(layer, d_probs);
    const bool branch = spec_.dropout > 0.0;
    const int d_branch =
        branch ? gradient("d_moe_out", layer, per_token(spec_.hidden * elem_)) : d_hidden_;
    const int shared_out = spec_.shared_ffn > 0 ? shared_expert(layer, d_branch) : -1;

    const int grad_back = gradient("grad_back", layer, per_token(k * wire_row));
    const int grad_rows = exchange ? gradient("grad_rows", layer, per_row(wire_row)) : grad_back;
    const auto [rows, row_probs] = dispatch(layer, routing, grad_back, grad_rows, d_probs);
    const int expert_out = experts(layer, rows, row_probs, grad_rows);

    int returned = expert_out;
    int grad_send = grad_rows;
    if (exchange) {
      returned = storage("combine_recv", layer, per_token(k * spec_.hidden * elem_));
      grad_send = gradient("grad_send", layer, per_token(k * wire_row));
      OpSpec& combine = op(OpKind::kCombine, layer, Stream::kComm);
      combine.reads = {expert_out};
      combine.creates = {returned};
      combine.bwd_reads = {grad_send};
      combine.bwd_creates = {grad_rows};
    }
    const int next = next_hidden(layer, "combine");
    OpSpec& unpack = op(OpKind::kCombineUnpack, layer);
    unpack.reads = {returned, routing.row_map, hidden_mid_};
    if (shared_out >= 0) unpack.reads.push_back(shared_out);
    unpack.creates = {next};
    // The gate weights only fill the wire's second column, whose place the experts' backward
    // needs for their gradients.
    unpack.bwd_saved = {routing.row_map, routing.topk_probs};
    unpack.bwd_reads = {d_hidden_};
    if (branch) unpack.bwd_creates.push_back(d_branch);
    unpack.bwd_creates.push_back(grad_send);
    hidden_ = next;
  }

  struct Routing {
    int topk_probs, row_map;
  };

  Routing router(int layer, int d_probs) {
    const int64_t k = spec_.top_k;
    const int logits = saved_exact("router_logits", layer, per_token(spec_.experts * kFp32Bytes),
                             "router", Rebuild::kNever);
    const int ids =
        saved_exact("topk_ids", layer, per_token(k * kExpertIdBytes), "router", Rebuild::kNever);
    const int probs =
        saved_exact("topk_probs", layer, per_token(k * kFp32Bytes), "router", Rebuild::kNever);
    const int row_map =
        saved_exact("row_map", layer, per_token(k * kIndexBytes), "router", Rebuild::kNever);
    graph_.units.back().pinned = true;
    OpSpec& router = op(OpKind::kRouter, layer);
    router.reads = {normed_mlp_};
    router.creates = {logits, ids, probs, row_map};
    router.bwd_saved = {logits, ids, probs, normed_mlp_};
    router.bwd_reads = {d_probs, d_normed_mlp_};
    router.has_wgrad = options_.split_weight_grads;
    // The input gradient leaves the logits' gradient in the logits' place.
    if (router.has_wgrad) router.wgrad_saved = {logits, normed_mlp_};
    graph_.gates.push_back({layer, static_cast<int>(graph_.ops.size()) - 1});
    return {probs, row_map};
  }

  int shared_expert(int layer, int d_branch) {
    const auto [act_out, d_act_out] = gated_mlp_inner(
        layer,
        {OpKind::kSharedFc1, OpKind::kSharedAct, OpKind::kSharedFc2, "shared", spec_.shared_ffn},
        false);
    const int out = storage("shared_out", layer, per_token(spec_.hidden * elem_));
    OpSpec& fc2 = op(OpKind::kSharedFc2, layer);
    fc2.reads = {act_out};
    fc2.creates = {out};
    fc2.bwd_saved = {act_out};
    fc2.bwd_reads = {d_branch};
    fc2.bwd_creates = {d_act_out};
    if (d_branch == d_hidden_) {
      split_with_copy(last_op(), layer, act_out);
    } else {
      split(fc2, act_out, d_branch);
    }
    return out;
  }

  std::pair<int, int> dispatch(int layer, const Routing& routing, int grad_back, int grad_rows,
                               int d_probs) {
    const int64_t k = spec_.top_k;
    const int64_t row = spec_.hidden * elem_;
    const bool exchange = options_.ep_size > 1;
    const Rebuild rebuild = exchange ? Rebuild::kNever : Rebuild::kOp;
    const int rows = saved("rows", layer, per_row(row), "dispatch", rebuild);
    const int row_probs = saved_exact("row_probs", layer, per_row(kFp32Bytes), "dispatch", rebuild);
    graph_.storages[rows].derived_from = exchange ? -1 : normed_mlp_;
    const int send = exchange ? storage("dispatch_send", layer, per_token(k * (row + kFp32Bytes)))
                              : -1;
    OpSpec& pack = op(OpKind::kDispatchPack, layer);
    pack.reads = {normed_mlp_, routing.row_map, routing.topk_probs};
    pack.creates = exchange ? std::vector<int>{send} : std::vector<int>{rows, row_probs};
    pack.bwd_saved = {routing.row_map};
    pack.bwd_reads = {grad_back};
    pack.bwd_creates = {d_normed_mlp_, d_probs};
    if (!exchange) return {rows, row_probs};

    const int recv = storage("dispatch_recv", layer, per_row(row + kFp32Bytes));
    OpSpec& a2a = op(OpKind::kDispatch, layer, Stream::kComm);
    a2a.reads = {send};
    a2a.creates = {recv};
    a2a.bwd_reads = {grad_rows};
    a2a.bwd_creates = {grad_back};
    OpSpec& unpack = op(OpKind::kDispatchUnpack, layer);
    unpack.reads = {recv};
    unpack.creates = {rows, row_probs};
    unpack.has_backward = false;  // the experts' backward writes the wire layout itself
    return {rows, row_probs};
  }

  int experts(int layer, int rows, int row_probs, int grad_rows) {
    const int64_t f = spec_.expert_ffn;
    const int fc1 =
        saved("expert_fc1.out", layer, per_row(2 * f * elem_), "expert_fc1", Rebuild::kInPieces);
    const int act = saved("moe_act.out", layer, per_row(f * elem_), "moe_act", Rebuild::kInPieces);
    graph_.storages[fc1].piece_bytes = per_piece_row(2 * f * elem_);
    graph_.storages[act].piece_bytes = per_piece_row(f * elem_);
    const int out = storage("expert_fc2.out", layer, per_row(spec_.hidden * elem_));
    OpSpec& experts = op(OpKind::kExperts, layer);
    experts.reads = {rows, row_probs};
    experts.creates = {fc1, act, out};
    experts.bwd_saved = {rows, row_probs, fc1, act};
    experts.bwd_reads = {grad_rows};
    if (options_.split_weight_grads) {
      experts.has_wgrad = true;
      experts.wgrad_saved = {rows, act};
      experts.wgrad_reads = {deferred("d_expert_fc1", layer, per_row(2 * f * elem_)),
                             deferred("d_expert_out", layer, per_row(spec_.hidden * elem_))};
      experts.bwd_creates = experts.wgrad_reads;
    }
    return out;
  }

  void head() {
    const int64_t h = spec_.hidden;
    const int normed =
        saved("normed_final", -1, per_token(h * elem_), "final_norm", Rebuild::kOp);
    const int rstd = saved_exact("rstd_final", -1, per_token(kFp32Bytes), "final_norm", Rebuild::kOp);
    const int d_normed = gradient("d_normed_final", -1, per_token(h * elem_));
    OpSpec& norm = op(OpKind::kFinalNorm, -1);
    norm.reads = {hidden_};
    norm.creates = {normed, rstd};
    norm.bwd_saved = {hidden_, rstd};
    norm.bwd_reads = {d_normed};
    norm.bwd_creates = {d_hidden_};
    const int log_probs =
        saved("log_probs", -1, per_token(spec_.vocab * kFp32Bytes), "lm_head", Rebuild::kOp);
    graph_.storages[log_probs].lossy_element_bytes = kFp32Bytes;
    OpSpec& head = op(OpKind::kLmHead, -1);
    head.reads = {normed};
    head.creates = {log_probs};
    head.bwd_saved = {log_probs, normed};
    head.bwd_creates = {d_normed};
  }

  const ModelSpec& spec_;
  const NativeGraphOptions& options_;
  const int64_t elem_;
  const StageSlice slice_;
  Graph graph_;
  int hidden_ = -1;      // layer input
  int hidden_mid_ = -1;  // after attention
  int normed_mlp_ = -1;
  int d_hidden_ = -1;
  int d_normed_mlp_ = -1;
};

}  // namespace

Graph build_native_graph(const ModelSpec& spec, const NativeGraphOptions& options) {
  if (const std::string feature = planned_only_feature(spec); !feature.empty()) {
    throw InvalidInput("model", "model", feature,
                       "a model that the runtime computes: no operator of it knows this");
  }
  if (options.stage) {
    const StageSlice& stage = *options.stage;
    BGL_CHECK(stage.first_layer >= 0 && stage.layers >= 0 &&
                  stage.first_layer + stage.layers <= spec.layers,
              stage.first_layer, stage.layers, spec.layers);
    BGL_CHECK(stage.layers > 0 || stage.embedding || stage.head, "an empty stage");
  }
  return Builder(spec, options).build();
}

}  // namespace bagualu
