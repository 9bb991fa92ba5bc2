#include <utility>

#include "bagualu/graph/megatron_builder.h"

namespace bagualu {
namespace {

constexpr int64_t kFp32Bytes = 4;
constexpr int64_t kRowMapBytes = 8;  // per token and expert: Transformer Engine's two int32
// Per token and expert: fp32 softmax of the scores and of those for the balancing loss, their top-k
// maps. Megatron-Core's router.py and moe_utils.py.
constexpr int64_t kScoreBytes = 10;

}  // namespace

int64_t MegatronBuilder::sent_rows() const {
  if (options_.sent_rows > 0) return options_.sent_rows;
  const int64_t tokens = gathers() ? tokens_ / options_.tp : tokens_;
  return tokens * spec_.top_k;
}

// With several local experts the rows of all senders are put in the experts' order, and back.
bool MegatronBuilder::sorts_rows() const {
  return options_.transients && options_.ep_size * options_.etp > 1 &&
         spec_.experts > options_.ep_size;
}

void MegatronBuilder::mlp_norm() {
  normed_mlp_ = norm(OpKind::kMlpNorm, "mlp", hidden_mid_, !spec_.is_moe(number_)).out;
  // Only the wide GEMMs read the FP8 copy; the router and the dispatch read bf16.
  mlp_input_ = {normed_mlp_, {normed_mlp_}};
  if (spec_.shared_ffn > 0 || !spec_.is_moe(number_)) {
    mlp_input_ = operand(normed_mlp_, "normed_mlp", spec_.hidden);
  }
}

// A layer's output is where its neighbours meet: kept or offloaded, as in the native graph. The
// last layer's output is sent away, and nothing here differentiates it.
void MegatronBuilder::finish_layer(std::vector<int> branches) {
  branches.push_back(hidden_mid_);
  const bool kept = !last_layer_ || options_.has_head;
  hidden_ = kept ? writer_.saved("hidden_out", hidden_bytes_, Rebuild::kNever)
                 : writer_.unsaved("hidden_out", hidden_bytes_);
  MegatronStep sum = {.kind = OpKind::kMlpBda, .reads = std::move(branches), .creates = {hidden_}};
  keep_mask(sum, "mlp_dropout.mask");
  writer_.add(std::move(sum));
}

void MegatronBuilder::keep_mask(MegatronStep& sum, const std::string& name) {
  if (!options_.transients || spec_.dropout <= 0) return;
  const int mask = writer_.constant(name, sequence_bytes(spec_.hidden), Rebuild::kNever);
  sum.creates.push_back(mask);
  sum.bwd_saved.push_back(mask);
}

int MegatronBuilder::mlp(const Mlp& mlp) {
  const int64_t ffn = mlp.ffn / options_.tp;
  const int64_t fc1_width = spec_.fc1_factor() * ffn;
  const int fc1 = writer_.saved(mlp.name + "_fc1.out", tokens_of(fc1_width));
  add_gemm({.kind = mlp.fc1,
            .reads = {mlp_input_.forward},
            .creates = {fc1},
            .bwd_saved = mlp_input_.saved},
           spec_.hidden, 0, fc1_width * spec_.hidden);
  const int act = gemm_input(mlp.name + "_act.out", tokens_of(ffn));
  MegatronStep activation = {.kind = mlp.act, .reads = {fc1}, .creates = {act}, .bwd_saved = {fc1}};
  keep_gate(activation, mlp.name + "_act.gate", tokens_of(ffn));
  writer_.add(std::move(activation));
  const Operand in = operand(act, mlp.name + "_act.out", ffn);
  const int out = writer_.unsaved(mlp.name + "_fc2.out", hidden_bytes_);
  add_gemm({.kind = mlp.fc2, .reads = {in.forward}, .creates = {out}, .bwd_saved = in.saved}, 0,
           spec_.hidden, ffn * spec_.hidden);
  return out;
}

void MegatronBuilder::keep_gate(MegatronStep& activation, const std::string& name,
                                ByteFormula bytes) {
  const bool gated = spec_.gated_mlp && !options_.activation_fused;
  // Only the gated activation has a kernel that multiplies by the gate weights at once.
  const bool weighted = !spec_.gated_mlp && options_.transients && activation.bwd_saved.size() > 1;
  if (!gated && !weighted) return;
  const int gate = writer_.constant(name, bytes);
  activation.creates.push_back(gate);
  activation.bwd_saved.push_back(gate);
  // The gradients of both factors, which are then put side by side.
  if (options_.transients) activation.bwd_scratch = {bytes, bytes};
}

void MegatronBuilder::dense_mlp() {
  finish_layer({mlp({OpKind::kMlpFc1, OpKind::kMlpAct, OpKind::kMlpFc2, "mlp", spec_.dense_ffn})});
}

void MegatronBuilder::moe() {
  const Routing routing = router();
  std::vector<int> branches;
  if (spec_.shared_ffn > 0) {
    branches.push_back(mlp(
        {OpKind::kSharedFc1, OpKind::kSharedAct, OpKind::kSharedFc2, "shared", spec_.shared_ffn}));
  }
  const Rows rows = dispatch(routing);
  branches.push_back(combine(experts(rows), routing, rows));
  finish_layer(std::move(branches));
}

MegatronBuilder::Routing MegatronBuilder::router() {
  const int64_t e = spec_.experts;
  const auto pinned = Rebuild::kNever;
  const int probs = writer_.pin(writer_.exact(
      "router_probs", sequence_bytes(e * options_.router_probs_element_bytes), pinned));
  const int map = writer_.pin(writer_.constant("routing_map", sequence_bytes(e), pinned));
  const int row_map =
      writer_.pin(writer_.constant("row_map", sequence_bytes(e * kRowMapBytes), pinned));
  MegatronStep step = {.kind = OpKind::kRouter,
                       .reads = {normed_mlp_},
                       .creates = {probs, map, row_map},
                       .bwd_saved = {normed_mlp_, probs, map}};
  if (options_.transients) {
    const int scores =
        writer_.pin(writer_.constant("router_scores", sequence_bytes(e * kScoreBytes), pinned));
    step.creates.push_back(scores);
    step.bwd_saved.push_back(scores);
  }
  writer_.add(std::move(step));
  writer_.gate();
  return {probs, row_map};
}

MegatronBuilder::Rows MegatronBuilder::dispatch(const Routing& routing) {
  const bool exchange = options_.ep_size * options_.etp > 1;
  const Rebuild rebuild = exchange ? Rebuild::kNever : Rebuild::kOp;
  const int rows = gemm_input("rows", rows_of(spec_.hidden), rebuild);
  std::vector<int> made = {rows};
  int row_probs = -1;
  if (!options_.gate_at_combine) {
    row_probs = writer_.exact("row_probs", {.per_row = kFp32Bytes}, rebuild);
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
    return {rows, row_probs, {}};
  }
  Rows received = receive(std::move(pack), std::move(made));
  received.rows = rows;
  received.probs = row_probs;
  return received;
}

// The exchange: rows sent, rows received, and rows in the experts' order where that differs. What
// is not saved stays with the caller until the layer's end.
MegatronBuilder::Rows MegatronBuilder::receive(MegatronStep pack, std::vector<int> made) {
  const bool probs = made.size() > 1;
  const int64_t wire_row = spec_.hidden * element_bytes_ + (probs ? kFp32Bytes : 0);
  Rows received = {};
  const int64_t sent = options_.allgather_dispatch ? sent_rows() / spec_.top_k : sent_rows();
  const bool per_token = options_.sent_rows == 0 && !gathers() && !options_.allgather_dispatch;
  const int send =
      writer_.unsaved("dispatch_send", per_token ? ByteFormula{.per_token = spec_.top_k * wire_row}
                                                 : ByteFormula{.fixed = sent * wire_row});
  pack.creates = {send};
  writer_.add(std::move(pack));
  if (options_.transients) received.holds.push_back(send);
  MegatronStep exchange = {.kind = OpKind::kDispatch, .reads = {send}, .stream = Stream::kComm};
  if (!sorts_rows()) {
    exchange.creates = std::move(made);
    writer_.add(std::move(exchange));
    return received;
  }
  const int64_t group = options_.ep_size * options_.etp;
  const int arrived = writer_.unsaved(
      "dispatch_recv", options_.allgather_dispatch ? ByteFormula{.fixed = sent * group * wire_row}
                                                   : ByteFormula{.per_row = wire_row});
  exchange.creates = {arrived};
  if (options_.etp > 1 && !options_.allgather_dispatch) {  // before the gather over etp
    exchange.fwd_scratch = {{.per_row = wire_row / options_.etp}};
    exchange.bwd_scratch = exchange.fwd_scratch;
  }
  writer_.add(std::move(exchange));
  writer_.add({.kind = OpKind::kDispatchUnpack, .reads = {arrived}, .creates = std::move(made)});
  received.holds.push_back(arrived);
  return received;
}

int MegatronBuilder::experts(const Rows& rows) {
  const int64_t ffn = spec_.expert_ffn / options_.etp;
  const int64_t fc1_width = spec_.fc1_factor() * ffn;
  const int64_t local = spec_.experts / options_.ep_size;
  const Operand in = operand(rows.rows, "rows", spec_.hidden, /*rows=*/true);
  const int fc1 = writer_.saved("expert_fc1.out", rows_of(fc1_width));
  add_gemm(
      {.kind = OpKind::kExpertFc1, .reads = {in.forward}, .creates = {fc1}, .bwd_saved = in.saved},
      0, 0, local * fc1_width * spec_.hidden);
  const int act = gemm_input("moe_act.out", rows_of(ffn));
  std::vector<int> act_reads = {fc1};
  if (rows.probs >= 0) act_reads.push_back(rows.probs);
  MegatronStep activation = {
      .kind = OpKind::kMoeAct, .reads = act_reads, .creates = {act}, .bwd_saved = act_reads};
  keep_gate(activation, "moe_act.gate", rows_of(ffn));
  writer_.add(std::move(activation));
  const Operand act_in = operand(act, "moe_act.out", ffn, /*rows=*/true);
  // Only an unpermute that multiplies by the gate weights reads the products in its backward.
  const bool kept = options_.gate_at_combine && options_.ep_size * options_.etp == 1;
  const int out = kept ? writer_.saved("expert_fc2.out", rows_of(spec_.hidden))
                       : writer_.unsaved("expert_fc2.out", rows_of(spec_.hidden));
  add_gemm({.kind = OpKind::kExpertFc2,
            .reads = {act_in.forward},
            .creates = {out},
            .bwd_saved = act_in.saved},
           0, 0, local * ffn * spec_.hidden);
  return out;
}

int MegatronBuilder::combine(int expert_out, const Routing& routing, const Rows& rows) {
  int returned = expert_out;
  std::vector<int> holds = rows.holds;
  if (options_.ep_size * options_.etp > 1) {
    if (sorts_rows()) {
      const int sorted = writer_.unsaved("combine_send", rows_of(spec_.hidden));
      writer_.add({.kind = OpKind::kDispatchUnpack,
                   .reads = {expert_out},
                   .creates = {sorted},
                   .name = "combine_pack"});
      returned = sorted;
    }
    if (options_.transients) holds.push_back(returned);
    const bool per_token = options_.sent_rows == 0 && !gathers();
    const ByteFormula bytes =
        per_token ? tokens_of(spec_.top_k * spec_.hidden)
                  : ByteFormula{.fixed = sent_rows() * spec_.hidden * element_bytes_};
    const int sent = returned;
    returned = options_.gate_at_combine ? writer_.saved("combine.returned", bytes, Rebuild::kNever)
                                        : writer_.unsaved("combine.returned", bytes);
    writer_.add({.kind = OpKind::kCombine,
                 .reads = {sent},
                 .creates = {returned},
                 .stream = Stream::kComm});
  }
  const int out = writer_.unsaved("moe_out", hidden_bytes_);
  MegatronStep unpack = {.kind = OpKind::kCombineUnpack,
                         .reads = {returned, routing.row_map},
                         .creates = {out},
                         .bwd_saved = {routing.row_map},
                         .holds = std::move(holds)};
  if (options_.gate_at_combine) {
    unpack.reads.push_back(routing.probs);
    unpack.bwd_saved.insert(unpack.bwd_saved.end(), {returned, routing.probs});
  }
  writer_.add(std::move(unpack));
  return out;
}

}  // namespace bagualu
