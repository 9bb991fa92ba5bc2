#include "bagualu/cost/job_ops.h"

#include <algorithm>
#include <cmath>

namespace bagualu {
namespace {

constexpr double kFp32Bytes = 4;

/// Parts that operators are made of, with the job's sizes at hand.
class OpWriter {
 public:
  OpWriter(const Job& job, JobOpList& ops)
      : job_(job),
        m_(job.model),
        ops_(ops),
        element_(static_cast<double>(job.element_bytes)),
        tokens_(static_cast<double>(job.tokens())),
        split_tokens_(static_cast<double>(job.sequence_tokens())),
        tp_(static_cast<double>(job.layout.tp)),
        hidden_(static_cast<double>(m_.hidden)) {}

  void attention(bool windowed);
  void dense_mlp();
  void moe(double factor);
  void head();
  void embedding();
  void mtp();

 private:
  double share(double n) const { return (n - 1) / n; }
  double split(int64_t width) const { return static_cast<double>(width) / tp_; }

  JobOp& memory(std::string_view name, double forward_bytes, double backward_bytes,
                double saved_bytes = 0);
  JobOp& gemm(std::string_view name, double rows, double in, double out, double copies = 1);
  JobOp& column(std::string_view name, double in, double out);
  JobOp& row(std::string_view name, double in, double out);
  JobOp& exchange(std::string_view name, JobOpClass kind, double forward_bytes,
                  double backward_bytes, int collectives = 1);
  JobOp& norm(std::string_view name, double rows, double width);
  void mlp(std::string_view fc1, std::string_view act, std::string_view fc2, double ffn);
  double activation(std::string_view name, double rows, double ffn);
  void residual(std::string_view name);
  void grouped_query();
  void latent();
  void core(bool windowed);
  void unfused_core(double heads, double qk, double pv);
  void context_exchange(double q, double kv, double out);
  void context_ring(double kv);
  void experts(double rows);

  const Job& job_;
  const ModelSpec& m_;
  JobOpList& ops_;
  double element_, tokens_, split_tokens_, tp_, hidden_;
};

JobOp& OpWriter::memory(std::string_view name, double forward_bytes, double backward_bytes,
                        double saved_bytes) {
  ops_.push({.name = name,
             .kind = JobOpClass::kMemory,
             .forward = {.memory_bytes = forward_bytes},
             .input_gradient = {.memory_bytes = backward_bytes},
             .saved_bytes = saved_bytes});
  return ops_.back();
}

JobOp& OpWriter::gemm(std::string_view name, double rows, double in, double out, double copies) {
  const double flops = 2 * rows * in * out;
  const double weights = in * out * copies;
  const double activations = rows * (in + out) * element_;
  // The gradient buffer is read and written by the GEMM; without that fusion the product is
  // written, then read again by an addition.
  const double gradient = static_cast<double>(job_.optimizer.gradient_bytes) * 2 +
                          (job_.accumulation_fusion ? 0 : 2 * element_);
  const double operand = job_.fp8 ? 1 : element_;
  const double casts = job_.fp8 ? rows * in * (element_ + 2) : 0;  // to FP8, in both layouts
  ops_.push({.name = name,
             .kind = JobOpClass::kGemm,
             .forward = {.flops = flops, .memory_bytes = activations + weights * operand + casts},
             .input_gradient = {.flops = flops, .memory_bytes = activations + weights * operand},
             .weight_gradient = {.flops = flops, .memory_bytes = activations + weights * gradient},
             .rows = rows,
             .in = in,
             .out = out,
             .copies = copies,
             .model_flops = flops,
             .weights = weights,
             .saved_bytes = rows * in * (job_.fp8 ? 1 : element_)});
  return ops_.back();
}

/// Weights split by columns: with sequence parallelism the input is gathered (again for the weight
/// gradient, beside the input gradient) and the input's gradient reduced beside the weight
/// gradient; without it the input's gradient is all-reduced there.
JobOp& OpWriter::column(std::string_view name, double in, double out) {
  JobOp& op = gemm(name, tokens_, in, out / tp_);
  if (tp_ == 1) return op;
  const double whole = tokens_ * in * element_ * share(tp_);
  if (job_.layout.sequence_parallel) {
    op.saved_bytes /= tp_;
    op.forward.wire_bytes = job_.overlap.tp ? 0 : whole;
    op.forward.hidden_wire_bytes = job_.overlap.tp ? whole : 0;
    op.forward.collectives = 1;
    op.input_gradient.hidden_wire_bytes = whole;
    op.input_gradient.collectives = 1;
    op.weight_gradient.hidden_wire_bytes = whole;
  } else {
    op.weight_gradient.hidden_wire_bytes = 2 * whole;
  }
  op.weight_gradient.collectives = 1;
  return op;
}

/// Weights split by rows: the output is reduced (scattered with sequence parallelism), and in the
/// backward its gradient is gathered.
JobOp& OpWriter::row(std::string_view name, double in, double out) {
  JobOp& op = gemm(name, tokens_, in / tp_, out);
  if (tp_ == 1) return op;
  const double whole = tokens_ * out * element_ * share(tp_);
  const double forward = job_.layout.sequence_parallel ? whole : 2 * whole;
  (job_.overlap.tp ? op.forward.hidden_wire_bytes : op.forward.wire_bytes) = forward;
  op.forward.collectives = 1;
  if (job_.layout.sequence_parallel) {
    auto& backward = op.input_gradient;
    (job_.overlap.tp ? backward.hidden_wire_bytes : backward.wire_bytes) = whole;
    backward.collectives = 1;
  }
  return op;
}

JobOp& OpWriter::exchange(std::string_view name, JobOpClass kind, double forward_bytes,
                          double backward_bytes, int collectives) {
  ops_.push({.name = name,
             .kind = kind,
             .forward = {.wire_bytes = forward_bytes, .collectives = collectives},
             .input_gradient = {.wire_bytes = backward_bytes, .collectives = collectives},
             .wire = kind,
             .kernels = 0});
  return ops_.back();
}

JobOp& OpWriter::norm(std::string_view name, double rows, double width) {
  // Backward: the input and the gradient read, the input's gradient written.
  return memory(name, 2 * rows * width * element_, 3 * rows * width * element_,
                rows * width * element_);
}

void OpWriter::residual(std::string_view name) {
  const double bytes = split_tokens_ * hidden_ * element_;
  const double dropout = m_.dropout > 0 ? 1.0 / element_ : 0;  // the mask, a byte per element
  memory(name, (3 + dropout) * bytes, (3 + dropout) * bytes, dropout * bytes);
}

/// Returns: the width that the activation makes of `ffn`.
double OpWriter::activation(std::string_view name, double rows, double ffn) {
  const double gates = static_cast<double>(m_.fc1_factor());
  const double bytes = rows * ffn * element_;
  memory(name, (gates + 1) * bytes, (2 * gates + 1) * bytes, gates * bytes);
  return ffn;
}

void OpWriter::mlp(std::string_view fc1, std::string_view act, std::string_view fc2, double ffn) {
  column(fc1, hidden_, static_cast<double>(m_.fc1_factor()) * ffn);
  activation(act, tokens_, ffn / tp_);
  row(fc2, ffn, hidden_);
}

void OpWriter::dense_mlp() {
  norm("mlp_norm", split_tokens_, hidden_);
  mlp("mlp_fc1", "mlp_act", "mlp_fc2", static_cast<double>(m_.dense_ffn));
  residual("mlp_residual");
}

void OpWriter::grouped_query() {
  const double q = static_cast<double>(m_.q_width());
  // Fewer key-value heads than ranks: each rank holds one.
  const double kv =
      std::max(static_cast<double>(m_.kv_width()), tp_ * static_cast<double>(m_.head_dim));
  column("qkv", hidden_, q + 2 * kv);
  if (m_.qk_norm) norm("qk_norm", tokens_, (q + kv) / tp_);
  if (m_.learned_positions == 0) {
    const double bytes = tokens_ * (q + kv) / tp_ * element_;
    memory("rope", 2 * bytes, 2 * bytes);
  }
}

/// Latents are made of the sequence's own part on every rank, then gathered over tp.
void OpWriter::latent() {
  const double q = static_cast<double>(m_.q_width());
  const double rank = static_cast<double>(m_.q_lora_rank);
  if (m_.q_lora_rank > 0) {
    gemm("q_down", split_tokens_, hidden_, rank);
    norm("q_norm", split_tokens_, rank);
    column("q_up", rank, q);
  } else {
    column("q_up", hidden_, q);
  }
  const double kv_rank = static_cast<double>(m_.kv_lora_rank);
  gemm("kv_down", split_tokens_, hidden_, static_cast<double>(m_.kv_down_width()));
  norm("kv_norm", split_tokens_, kv_rank);
  column("kv_up", kv_rank, static_cast<double>(m_.kv_up_width()));
  // Queries rotated in place; keys put together from the up-projection and the rotated part.
  const double bytes = tokens_ * q / tp_ * element_;
  memory("rope", 4 * bytes, 4 * bytes);
}

void OpWriter::attention(bool windowed) {
  norm("attn_norm", split_tokens_, hidden_);
  m_.has_mla() ? latent() : grouped_query();
  core(windowed);
  row("attn_proj", static_cast<double>(m_.attn_out_width()), hidden_);
  residual("attn_residual");
}

void OpWriter::core(bool windowed) {
  const double seq = static_cast<double>(job_.seq);
  const double window = windowed ? std::min(seq, static_cast<double>(m_.attention_window)) : seq;
  // Keys that a token sees on average: all before it, at most the window.
  const double keys = window - window * window / (2 * seq);
  const double q = split(m_.q_width());
  const double out = split(m_.attn_out_width());
  const double kv =
      m_.has_mla() ? q + out : 2 * std::max(split(m_.kv_width()), static_cast<double>(m_.head_dim));
  context_exchange(q, kv, out);
  const double bytes = tokens_ * (q + kv + out) * element_;
  if (job_.attention_unfused) {
    unfused_core(split(m_.heads), q, out);
  } else {
    // Two products; the backward repeats the first and makes two gradients of each.
    ops_.push({.name = "core_attn",
               .kind = JobOpClass::kAttention,
               .forward = {.flops = 2 * tokens_ * keys * (q + out), .memory_bytes = bytes},
               .input_gradient = {.flops = 2 * tokens_ * keys * (3 * q + 2 * out),
                                  .memory_bytes = 2 * bytes},
               .saved_bytes = tokens_ * (q + kv) * element_});
  }
  ops_.back().model_flops = 2 * tokens_ * keys * (q + out);
  context_ring(kv);
}

/// Products over the whole square of scores, kernels of their own for the masked softmax and the
/// dropout.
void OpWriter::unfused_core(double heads, double q, double out) {
  const double seq = static_cast<double>(job_.seq);
  const double scores = tokens_ * seq * heads;
  const double dropout = m_.dropout > 0 ? 2 * element_ + 1 : 0;
  memory("core_softmax", scores * (2 * element_ + dropout), scores * (3 * element_ + dropout),
         scores * (element_ + dropout))
      .kernels = m_.dropout > 0 ? 2 : 1;
  const double operands = tokens_ * (2 * q + 2 * out) * element_ + 2 * scores * element_;
  const double flops = 2 * tokens_ * seq * (q + out);
  ops_.push({.name = "core_attn",
             .kind = JobOpClass::kGemm,
             .forward = {.flops = flops, .memory_bytes = operands},
             .input_gradient = {.flops = 2 * flops, .memory_bytes = 2 * operands},
             .saved_bytes = tokens_ * (2 * q + out) * element_,
             .kernels = 2});
}

/// Before the core attention: heads in exchange for positions, or all keys and values.
void OpWriter::context_exchange(double q, double kv, double out) {
  const double cp = static_cast<double>(job_.layout.cp);
  if (cp == 1 || job_.cp_exchange == CpExchange::kRing) return;
  if (job_.cp_exchange == CpExchange::kAllGather) {
    const double received = tokens_ * kv * element_ * (cp - 1);
    exchange("cp_gather", JobOpClass::kCpExchange, received, 2 * received);
    return;
  }
  const double bytes = tokens_ * (q + kv + out) * element_;
  exchange("cp_exchange", JobOpClass::kCpExchange, bytes * share(cp), bytes * share(cp), 4);
  // Heads and positions change places in memory before and after.
  memory("cp_reorder", 4 * bytes, 4 * bytes);
}

/// Round the ring, beside the attention of the step before; the gradients travel too.
void OpWriter::context_ring(double kv) {
  const double cp = static_cast<double>(job_.layout.cp);
  if (cp == 1 || job_.cp_exchange != CpExchange::kRing) return;
  const double received = tokens_ * kv * element_ * (cp - 1);
  JobOp& op = ops_.back();
  op.wire = JobOpClass::kCpExchange;
  op.forward.hidden_wire_bytes = received;
  op.input_gradient.hidden_wire_bytes = 2 * received;
  op.forward.collectives = op.input_gradient.collectives = static_cast<int>(cp) - 1;
}

void OpWriter::moe(double factor) {
  norm("mlp_norm", split_tokens_, hidden_);
  const double count = static_cast<double>(m_.experts);
  gemm("router", split_tokens_, hidden_, count);
  const double scores = split_tokens_ * count * kFp32Bytes;
  JobOp& top_k = memory("top_k", 6 * scores, 3 * scores, scores);
  top_k.kernels = 8;
  experts(static_cast<double>(job_.balanced_rows()) * effective_factor(job_, factor));
  if (m_.shared_ffn > 0) {
    const int first = ops_.size();
    mlp("shared_fc1", "shared_act", "shared_fc2", static_cast<double>(m_.shared_ffn));
    ops_.set_with_exchange(first, job_.overlap.shared_expert);
    residual("shared_add");
  }
  residual("mlp_residual");
}

void OpWriter::experts(double rows) {
  const JobLayout& l = job_.layout;
  const double ep = static_cast<double>(l.ep);
  const double etp = static_cast<double>(l.etp);
  const double local = static_cast<double>(m_.experts) / ep;
  const double ffn = static_cast<double>(m_.expert_ffn) / etp;
  const double row_bytes = hidden_ * element_;
  const double own_rows = rows / etp;  // before those of the etp group are gathered
  const double source = split_tokens_ * row_bytes;
  // Rows for other ranks, or every rank's tokens to all.
  const double sent =
      job_.moe.dispatcher == "allgather" ? source * (ep - 1) : own_rows * row_bytes * share(ep);
  memory("permute", source + own_rows * row_bytes, source + own_rows * row_bytes);
  if (ep > 1) exchange("dispatch", JobOpClass::kEpExchange, sent, sent);
  if (etp > 1) {
    const double gathered = rows * row_bytes * share(etp);
    exchange("etp_gather", JobOpClass::kTpExchange, gathered, gathered).expert = true;
  }
  // Rows of one expert come from every rank and are brought together.
  if (ep * etp > 1 && local > 1) memory("sort_rows", 2 * rows * row_bytes, 2 * rows * row_bytes);
  for (const bool first : {true, false}) {
    const double gates = static_cast<double>(m_.fc1_factor());
    JobOp& op = first ? gemm("expert_fc1", rows, hidden_, gates * ffn, local)
                      : gemm("expert_fc2", rows, ffn, hidden_, local);
    op.kind = JobOpClass::kGroupedGemm;
    op.expert = true;
    // The job's tokens are what they are, whichever rank gets them and whatever is padded.
    op.model_flops *= static_cast<double>(job_.balanced_rows()) / std::max(rows, 1.0);
    if (first) activation("moe_act", rows, ffn);
  }
  if (ep * etp > 1 && local > 1) memory("unsort_rows", 2 * rows * row_bytes, 2 * rows * row_bytes);
  if (etp > 1) {
    const double reduced = rows * row_bytes * share(etp);
    exchange("etp_reduce", JobOpClass::kTpExchange, reduced, reduced).expert = true;
  }
  if (ep > 1) exchange("combine", JobOpClass::kEpExchange, sent, sent);
  memory("unpermute", source + own_rows * row_bytes, source + own_rows * row_bytes,
         job_.moe.probs_in_activation ? 0 : own_rows * row_bytes);
}

void OpWriter::embedding() {
  const double bytes = tokens_ * hidden_ * element_;
  JobOp& op = memory("embedding", 2 * bytes, 2 * bytes + tokens_ * hidden_ * kFp32Bytes * 2);
  op.weights = static_cast<double>(job_.padded_vocab()) * hidden_ / tp_ +
               static_cast<double>(m_.learned_positions) * hidden_;
  if (tp_ == 1) return;
  const double whole = bytes * share(tp_);
  exchange("embedding_reduce", JobOpClass::kTpExchange,
           job_.layout.sequence_parallel ? whole : 2 * whole,
           job_.layout.sequence_parallel ? whole : 0);
}

void OpWriter::head() {
  norm("final_norm", split_tokens_, hidden_);
  column("lm_head", hidden_, static_cast<double>(job_.padded_vocab()));
  if (m_.tied_embeddings) ops_.back().weights = 0;
  const double logits = tokens_ * static_cast<double>(job_.padded_vocab()) / tp_;
  // Passes over the logits in memory: see docs/design.md, "Cost of jobs".
  double forward = logits * 34;
  double backward = logits * 14;
  if (job_.cross_entropy == CrossEntropy::kFusedNative) forward = logits * 26;
  if (job_.cross_entropy == CrossEntropy::kFusedTe) {
    forward = logits * (2 * element_ + element_);
    backward = logits * 2 * element_;
  }
  memory("loss", forward, backward).kernels = 4;
}

void OpWriter::mtp() {
  norm("mtp_hidden_norm", split_tokens_, hidden_);
  norm("mtp_embedding_norm", split_tokens_, hidden_);
  column("mtp_proj", 2 * hidden_, hidden_);
}

}  // namespace

std::string_view job_op_class_name(JobOpClass kind) {
  constexpr std::array<std::string_view, kJobOpClasses> kNames = {
      "gemm", "grouped_gemm", "attention", "memory", "tp_exchange", "cp_exchange", "ep_exchange"};
  return kNames[static_cast<size_t>(kind)];
}

JobLayerKind layer_kind(const ModelSpec& model, int64_t layer) {
  const bool windowed = model.attention_window > 0 && !model.windowed_layer.empty() &&
                        model.windowed_layer[static_cast<size_t>(layer)] != 0;
  return {.moe = model.has_moe() && model.is_moe(layer), .windowed = windowed};
}

double effective_factor(const Job& job, double factor) {
  const double capacity = job.moe.capacity_factor;
  if (capacity == 0) return factor;
  return job.moe.pad_to_capacity ? capacity : std::min(factor, capacity);
}

JobOpList layer_ops(const Job& job, JobLayerKind kind, double factor) {
  JobOpList ops;
  OpWriter writer(job, ops);
  writer.attention(kind.windowed);
  kind.moe ? writer.moe(factor) : writer.dense_mlp();
  return ops;
}

JobOpList embedding_ops(const Job& job) {
  JobOpList ops;
  OpWriter(job, ops).embedding();
  return ops;
}

JobOpList head_ops(const Job& job) {
  JobOpList ops;
  OpWriter(job, ops).head();
  return ops;
}

JobOpList mtp_ops(const Job& job) {
  JobOpList ops;
  OpWriter(job, ops).mtp();
  return ops;
}

}  // namespace bagualu
