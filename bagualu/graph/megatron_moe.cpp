#include "bagualu/graph/megatron_moe.h"

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/graph/megatron_writer.h"

namespace bagualu {
namespace {

constexpr int64_t kFp32Bytes = 4;
constexpr int64_t kRowMapBytes = 8;    // per token and expert: Transformer Engine's two int32
constexpr int64_t kScaledBlock = 128;  // elements that share one FP8 scale

ByteFormula per_token(int64_t bytes) { return {.per_token = bytes}; }
ByteFormula per_row(int64_t bytes) { return {.per_row = bytes}; }

int64_t fp8_bytes(int64_t width) {
  return width + (width + kScaledBlock - 1) / kScaledBlock * kFp32Bytes;
}

class StageBuilder {
 public:
  StageBuilder(const ModelSpec& spec, const MegatronGraphOptions& options, int64_t layers)
      : spec_(spec),
        options_(options),
        layers_(layers),
        hidden_bytes_(per_token(spec.hidden * kMegatronElementBytes)),
        writer_(options.micro_batch_size * options.seq, layers) {}

  Graph build() {
    begin();
    for (int layer = 0; layer < layers_; ++layer) {
      number_ = options_.first_layer + layer;
      writer_.enter_layer(layer, number_);
      last_layer_ = layer + 1 == layers_;
      attention();
      mlp_norm();
      if (spec_.is_moe(number_)) {
        moe();
      } else {
        dense_mlp();
      }
    }
    writer_.enter_layer(-1, -1);
    end();
    return writer_.take();
  }

 private:
  ByteFormula tokens_of(int64_t width) const { return per_token(width * kMegatronElementBytes); }
  ByteFormula rows_of(int64_t width) const { return per_row(width * kMegatronElementBytes); }

  void begin() {
    if (options_.has_embedding) {
      hidden_ = writer_.saved("embedding.out", hidden_bytes_);
      writer_.add({.kind = OpKind::kEmbedding, .creates = {hidden_}});
    } else {
      hidden_ = writer_.saved("stage_recv.out", hidden_bytes_, Rebuild::kNever);
      writer_.add({.kind = OpKind::kStageRecv, .creates = {hidden_}, .stream = Stream::kComm});
    }
  }

  void end() {
    if (!options_.has_head) {
      writer_.add({.kind = OpKind::kStageSend, .reads = {hidden_}, .stream = Stream::kComm});
      return;
    }
    const Normed normed = norm(OpKind::kFinalNorm, "final", hidden_);
    const int logits = writer_.unsaved("lm_head.out", tokens_of(spec_.vocab));
    writer_.add({.kind = OpKind::kLmHead,
                 .reads = {normed.out},
                 .creates = {logits},
                 .bwd_saved = {normed.out}});
    const int softmax = writer_.saved("loss.softmax", per_token(spec_.vocab * kFp32Bytes));
    writer_.storage(softmax).lossy_element_bytes = kFp32Bytes;
    writer_.add(
        {.kind = OpKind::kLoss, .reads = {logits}, .creates = {softmax}, .bwd_saved = {softmax}});
  }

  struct Normed {
    int out, rstd;
  };

  Normed norm(OpKind kind, std::string_view which, int input) {
    const Normed made = {writer_.saved("normed_" + std::string(which), hidden_bytes_),
                         writer_.constant("rstd_" + std::string(which), per_token(kFp32Bytes))};
    writer_.add({.kind = kind,
                 .reads = {input},
                 .creates = {made.out, made.rstd},
                 .bwd_saved = {input, made.rstd}});
    return made;
  }

  // A GEMM input in the precision that the GEMM reads, and what its backward reads.
  struct Operand {
    int forward;
    std::vector<int> saved;
  };

  Operand operand(int storage, const std::string& name, int64_t width, bool rows = false) {
    if (!options_.fp8_twins) return {storage, {storage}};
    const int64_t bytes = fp8_bytes(width);
    const int copy = writer_.twin(storage, name, rows ? per_row(bytes) : per_token(bytes));
    return {copy, {storage, copy}};
  }

  void attention() {
    const int input = hidden_;
    const Normed normed = norm(OpKind::kAttnNorm, "attn", input);
    const Operand x = operand(normed.out, "normed_attn", spec_.hidden);
    const auto [q_in, k_in, v] = spec_.has_mla() ? latent_projections(x) : projections(x);
    const int q = writer_.saved("q", tokens_of(spec_.q_width()));
    writer_.add({.kind = OpKind::kQRope, .reads = {q_in}, .creates = {q}});
    const int k = writer_.saved("k", tokens_of(spec_.kv_width()));
    writer_.add({.kind = OpKind::kKRope, .reads = k_in, .creates = {k}});

    const int out = writer_.saved("attn_out", tokens_of(spec_.attn_out_width()));
    const int lse = writer_.constant("attn_lse", per_token(spec_.heads * kFp32Bytes));
    writer_.add({.kind = OpKind::kCoreAttn,
                 .reads = {q, k, v},
                 .creates = {out, lse},
                 .bwd_saved = {q, k, v, out, lse}});
    const int projected = writer_.unsaved("attn_proj.out", hidden_bytes_);
    writer_.add(
        {.kind = OpKind::kAttnProj, .reads = {out}, .creates = {projected}, .bwd_saved = {out}});
    hidden_mid_ = writer_.saved("hidden_mid", hidden_bytes_);
    writer_.add({.kind = OpKind::kAttnBda, .reads = {projected, input}, .creates = {hidden_mid_}});
  }

  // What the rotations read, and the values.
  struct AttentionInputs {
    int q;
    std::vector<int> k;
    int v;
  };

  // Grouped-query attention. The fused kernel wants q, k, v apart, so v is copied out of the GEMM's
  // output; so are q and k where a norm follows, else the rotation reads them in place.
  AttentionInputs projections(const Operand& x) {
    const int v = writer_.saved("v", tokens_of(spec_.kv_width()));
    MegatronStep qkv = {.kind = OpKind::kQkv, .reads = {x.forward}, .bwd_saved = x.saved};
    if (!spec_.qk_norm) {
      const int out = writer_.unsaved("qkv.out", tokens_of(spec_.qkv_width()));
      qkv.creates = {out, v};
      writer_.add(std::move(qkv));
      return {out, {out}, v};
    }
    const int q_raw = writer_.saved("q_raw", tokens_of(spec_.q_width()));
    const int k_raw = writer_.saved("k_raw", tokens_of(spec_.kv_width()));
    qkv.creates = {q_raw, k_raw, v};
    writer_.add(std::move(qkv));
    const int q = head_norm(OpKind::kQNorm, "q", q_raw, spec_.q_width(), spec_.heads);
    const int k = head_norm(OpKind::kKNorm, "k", k_raw, spec_.kv_width(), spec_.kv_heads);
    return {q, {k}, v};
  }

  // RMSNorm over the heads' width; the rotation behind it keeps nothing, so its output is unsaved.
  int head_norm(OpKind kind, const std::string& which, int input, int64_t width, int64_t heads) {
    const int out = writer_.unsaved(which + "_normed", tokens_of(width));
    const int rstd = writer_.constant(which + "_rstd", per_token(heads * kFp32Bytes));
    writer_.add(
        {.kind = kind, .reads = {input}, .creates = {out, rstd}, .bwd_saved = {input, rstd}});
    return out;
  }

  // Multi-head latent attention. kv_down and kv_up hand on two things each: a contiguous copy that
  // is saved (the latent, the values) and the output itself, which the rotation of k reads.
  AttentionInputs latent_projections(const Operand& x) {
    const int q_compressed = writer_.saved("q_compressed", tokens_of(spec_.q_lora_rank));
    writer_.add({.kind = OpKind::kQDown,
                 .reads = {x.forward},
                 .creates = {q_compressed},
                 .bwd_saved = x.saved});
    const int q_normed = latent_norm(OpKind::kQNorm, "q", q_compressed, spec_.q_lora_rank);
    const int q_up = writer_.unsaved("q_up.out", tokens_of(spec_.q_width()));
    writer_.add(
        {.kind = OpKind::kQUp, .reads = {q_normed}, .creates = {q_up}, .bwd_saved = {q_normed}});

    const int kv_down = writer_.unsaved("kv_down.out", tokens_of(spec_.kv_down_width()));
    const int kv_compressed = writer_.saved("kv_compressed", tokens_of(spec_.kv_lora_rank));
    writer_.add({.kind = OpKind::kKvDown,
                 .reads = {x.forward},
                 .creates = {kv_down, kv_compressed},
                 .bwd_saved = x.saved});
    const int kv_normed = latent_norm(OpKind::kKvNorm, "kv", kv_compressed, spec_.kv_lora_rank);
    const int kv_up = writer_.unsaved("kv_up.out", tokens_of(spec_.kv_up_width()));
    const int v = writer_.saved("v", tokens_of(spec_.attn_out_width()));
    writer_.add({.kind = OpKind::kKvUp,
                 .reads = {kv_normed},
                 .creates = {kv_up, v},
                 .bwd_saved = {kv_normed}});
    return {q_up, {kv_up, kv_down}, v};
  }

  int latent_norm(OpKind kind, const std::string& which, int input, int64_t width) {
    const int out = writer_.saved(which + "_normed", tokens_of(width));
    const int rstd = writer_.constant(which + "_rstd", per_token(kFp32Bytes));
    writer_.add(
        {.kind = kind, .reads = {input}, .creates = {out, rstd}, .bwd_saved = {input, rstd}});
    return out;
  }

  void mlp_norm() {
    normed_mlp_ = norm(OpKind::kMlpNorm, "mlp", hidden_mid_).out;
    // Only the wide GEMMs read the FP8 copy; the router and the dispatch read bf16.
    mlp_input_ = {normed_mlp_, {normed_mlp_}};
    if (spec_.shared_ffn > 0 || !spec_.is_moe(number_)) {
      mlp_input_ = operand(normed_mlp_, "normed_mlp", spec_.hidden);
    }
  }

  // A layer's output is where its neighbours meet: kept or offloaded, as in the native graph. The
  // last layer's output is sent away, and nothing here differentiates it.
  void finish_layer(std::vector<int> branches) {
    branches.push_back(hidden_mid_);
    const bool kept = !last_layer_ || options_.has_head;
    hidden_ = kept ? writer_.saved("hidden_out", hidden_bytes_, Rebuild::kNever)
                   : writer_.unsaved("hidden_out", hidden_bytes_);
    writer_.add({.kind = OpKind::kMlpBda, .reads = std::move(branches), .creates = {hidden_}});
  }

  struct GatedMlp {
    OpKind fc1, act, fc2;
    std::string name;
    int64_t ffn;
  };

  int gated_mlp(const GatedMlp& mlp) {
    const int fc1 = writer_.saved(mlp.name + "_fc1.out", tokens_of(2 * mlp.ffn));
    writer_.add({.kind = mlp.fc1,
                 .reads = {mlp_input_.forward},
                 .creates = {fc1},
                 .bwd_saved = mlp_input_.saved});
    const int act = writer_.saved(mlp.name + "_act.out", tokens_of(mlp.ffn));
    writer_.add({.kind = mlp.act, .reads = {fc1}, .creates = {act}, .bwd_saved = {fc1}});
    const Operand in = operand(act, mlp.name + "_act.out", mlp.ffn);
    const int out = writer_.unsaved(mlp.name + "_fc2.out", hidden_bytes_);
    writer_.add({.kind = mlp.fc2, .reads = {in.forward}, .creates = {out}, .bwd_saved = in.saved});
    return out;
  }

  void dense_mlp() {
    finish_layer(
        {gated_mlp({OpKind::kMlpFc1, OpKind::kMlpAct, OpKind::kMlpFc2, "mlp", spec_.dense_ffn})});
  }

  void moe() {
    const Routing routing = router();
    std::vector<int> branches;
    if (spec_.shared_ffn > 0) {
      branches.push_back(gated_mlp({OpKind::kSharedFc1, OpKind::kSharedAct, OpKind::kSharedFc2,
                                    "shared", spec_.shared_ffn}));
    }
    const Rows rows = dispatch(routing);
    branches.push_back(combine(experts(rows), routing));
    finish_layer(std::move(branches));
  }

  struct Routing {
    int probs, row_map;
  };

  Routing router() {
    const int64_t e = spec_.experts;
    const auto pinned = Rebuild::kNever;
    const int probs = writer_.pin(
        writer_.exact("router_probs", per_token(e * options_.router_probs_element_bytes), pinned));
    const int map = writer_.pin(writer_.constant("routing_map", per_token(e), pinned));
    const int row_map =
        writer_.pin(writer_.constant("row_map", per_token(e * kRowMapBytes), pinned));
    writer_.add({.kind = OpKind::kRouter,
                 .reads = {normed_mlp_},
                 .creates = {probs, map, row_map},
                 .bwd_saved = {normed_mlp_, probs, map}});
    writer_.gate();
    return {probs, row_map};
  }

  struct Rows {
    int rows, probs;  ///< probs -1: gate weights stay at the source
  };

  Rows dispatch(const Routing& routing) {
    const bool exchange = options_.ep_size > 1;
    const Rebuild rebuild = exchange ? Rebuild::kNever : Rebuild::kOp;
    const int rows = writer_.saved("rows", rows_of(spec_.hidden), rebuild);
    std::vector<int> made = {rows};
    int row_probs = -1;
    if (!options_.gate_at_combine) {
      row_probs = writer_.exact("row_probs", per_row(kFp32Bytes), rebuild);
      made.push_back(row_probs);
    }
    MegatronStep pack = {.kind = OpKind::kDispatchPack,
                         .reads = {normed_mlp_, routing.row_map},
                         .bwd_saved = {routing.row_map}};
    if (row_probs >= 0) pack.reads.push_back(routing.probs);
    if (!exchange) {
      writer_.storage(rows).derived_from = normed_mlp_;
      pack.creates = std::move(made);
      writer_.add(std::move(pack));
      return {rows, row_probs};
    }
    const int64_t wire_row =
        spec_.hidden * kMegatronElementBytes + (row_probs >= 0 ? kFp32Bytes : 0);
    const int send = writer_.unsaved("dispatch_send", per_token(spec_.top_k * wire_row));
    pack.creates = {send};
    writer_.add(std::move(pack));
    writer_.add({.kind = OpKind::kDispatch,
                 .reads = {send},
                 .creates = std::move(made),
                 .stream = Stream::kComm});
    return {rows, row_probs};
  }

  int experts(const Rows& rows) {
    const Operand in = operand(rows.rows, "rows", spec_.hidden, /*rows=*/true);
    const int fc1 = writer_.saved("expert_fc1.out", rows_of(2 * spec_.expert_ffn));
    writer_.add({.kind = OpKind::kExpertFc1,
                 .reads = {in.forward},
                 .creates = {fc1},
                 .bwd_saved = in.saved});
    const int act = writer_.saved("moe_act.out", rows_of(spec_.expert_ffn));
    std::vector<int> act_reads = {fc1};
    if (rows.probs >= 0) act_reads.push_back(rows.probs);
    writer_.add(
        {.kind = OpKind::kMoeAct, .reads = act_reads, .creates = {act}, .bwd_saved = act_reads});
    const Operand act_in = operand(act, "moe_act.out", spec_.expert_ffn, /*rows=*/true);
    // Only an unpermute that multiplies by the gate weights reads the products in its backward.
    const bool kept = options_.gate_at_combine && options_.ep_size == 1;
    const int out = kept ? writer_.saved("expert_fc2.out", rows_of(spec_.hidden))
                         : writer_.unsaved("expert_fc2.out", rows_of(spec_.hidden));
    writer_.add({.kind = OpKind::kExpertFc2,
                 .reads = {act_in.forward},
                 .creates = {out},
                 .bwd_saved = act_in.saved});
    return out;
  }

  int combine(int expert_out, const Routing& routing) {
    int returned = expert_out;
    if (options_.ep_size > 1) {
      const ByteFormula bytes = tokens_of(spec_.top_k * spec_.hidden);
      returned = options_.gate_at_combine
                     ? writer_.saved("combine.returned", bytes, Rebuild::kNever)
                     : writer_.unsaved("combine.returned", bytes);
      writer_.add({.kind = OpKind::kCombine,
                   .reads = {expert_out},
                   .creates = {returned},
                   .stream = Stream::kComm});
    }
    const int out = writer_.unsaved("moe_out", hidden_bytes_);
    MegatronStep unpack = {.kind = OpKind::kCombineUnpack,
                           .reads = {returned, routing.row_map},
                           .creates = {out},
                           .bwd_saved = {routing.row_map}};
    if (options_.gate_at_combine) {
      unpack.reads.push_back(routing.probs);
      unpack.bwd_saved.insert(unpack.bwd_saved.end(), {returned, routing.probs});
    }
    writer_.add(std::move(unpack));
    return out;
  }

  const ModelSpec& spec_;
  const MegatronGraphOptions& options_;
  const int64_t layers_;
  const ByteFormula hidden_bytes_;
  MegatronWriter writer_;
  bool last_layer_ = false;
  int64_t number_ = 0;  ///< of the layer, in the model
  int hidden_ = -1;     ///< layer input
  int hidden_mid_ = -1;
  int normed_mlp_ = -1;
  Operand mlp_input_ = {};
};

void check_options(const ModelSpec& spec, const MegatronGraphOptions& options, int64_t layers) {
  const auto fail = [](const char* field, int64_t found, std::string allowed) {
    throw InvalidInput("megatron graph", field, std::to_string(found), std::move(allowed));
  };
  const std::string of_model = ", the model has " + std::to_string(spec.layers) + " layers";
  if (options.first_layer < 0 || options.first_layer >= spec.layers) {
    fail("first_layer", options.first_layer, "a layer from 0" + of_model);
  }
  if (layers < 1 || options.first_layer + layers > spec.layers) {
    fail("layer_count", options.layer_count, "layers behind first_layer" + of_model);
  }
  if (options.ep_size < 1 || spec.experts % options.ep_size != 0) {
    fail("ep_size", options.ep_size, "a divisor of experts = " + std::to_string(spec.experts));
  }
  if (options.micro_batch_size < 1) fail("micro_batch_size", options.micro_batch_size, "1 or more");
  if (options.seq < 1) fail("seq", options.seq, "1 or more");
}

}  // namespace

Graph build_megatron_graph(const ModelSpec& spec, const MegatronGraphOptions& options) {
  const int64_t layers =
      options.layer_count == 0 ? spec.layers - options.first_layer : options.layer_count;
  check_options(spec, options, layers);
  return StageBuilder(spec, options, layers).build();
}

}  // namespace bagualu
