#include "bagualu/graph/megatron_moe.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/graph/megatron_builder.h"

namespace bagualu {
namespace {

constexpr int64_t kFp32Bytes = 4;
constexpr int64_t kScaledBlock = 128;  // elements that share one FP8 scale

ByteFormula per_token(int64_t bytes) { return {.per_token = bytes}; }

int64_t fp8_bytes(int64_t width) {
  return width + (width + kScaledBlock - 1) / kScaledBlock * kFp32Bytes;
}

int64_t split_bytes(const MegatronGraphOptions& options, int64_t bytes) {
  return options.micro_batch_size * options.seq / options.tp * bytes;
}

}  // namespace

MegatronBuilder::MegatronBuilder(const ModelSpec& spec, const MegatronGraphOptions& options,
                                 int64_t layers)
    : spec_(spec),
      options_(options),
      layers_(layers),
      element_bytes_(options.element_bytes),
      tokens_(options.micro_batch_size * options.seq),
      hidden_bytes_(sequence_of(spec.hidden)),
      writer_(tokens_, layers, options.transients, options.split_weight_grads) {}

ByteFormula MegatronBuilder::sequence_bytes(int64_t bytes) const {
  return gathers() ? ByteFormula{.fixed = split_bytes(options_, bytes)} : per_token(bytes);
}

Graph MegatronBuilder::build() {
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
  Graph graph = writer_.take();
  graph.first_layer = static_cast<int>(options_.first_layer);
  return graph;
}

Graph MegatronBuilder::build_head() {
  begin();
  head();
  return writer_.take();
}

void MegatronBuilder::begin() {
  if (options_.has_embedding) {
    hidden_ = writer_.saved("embedding.out", hidden_bytes_);
    writer_.add({.kind = OpKind::kEmbedding, .creates = {hidden_}});
  } else {
    hidden_ = writer_.saved("stage_recv.out", hidden_bytes_, Rebuild::kNever);
    writer_.add({.kind = OpKind::kStageRecv, .creates = {hidden_}, .stream = Stream::kComm});
  }
}

void MegatronBuilder::end() {
  if (options_.has_head) {
    head();
    return;
  }
  writer_.add({.kind = OpKind::kStageSend, .reads = {hidden_}, .stream = Stream::kComm});
}

// Transformer Engine's loss writes the logits' gradient in their place; the others make a copy in
// fp32 first, turn it into the softmax in place, and that into the gradient.
void MegatronBuilder::head() {
  const Normed normed = norm(OpKind::kFinalNorm, "final", hidden_);
  const int64_t vocab =
      (options_.padded_vocab > 0 ? options_.padded_vocab : spec_.vocab) / options_.tp;
  const bool in_place = options_.cross_entropy == CrossEntropy::kFusedTe;
  MegatronStep step = {.kind = OpKind::kLmHead, .reads = {normed.out}, .bwd_saved = {normed.out}};
  const int logits = in_place ? writer_.constant("lm_head.out", tokens_of(vocab))
                              : writer_.unsaved("lm_head.out", tokens_of(vocab));
  step.creates = {logits};
  step.weights = true;
  if (in_place) step.bwd_saved.push_back(logits);
  if (options_.transients) {
    const ByteFormula whole = tokens_of(spec_.hidden);
    if (gathers()) step.bwd_scratch.push_back(whole);  // the input's gradient before its sum
    if (options_.weight_gradients) {
      step.bwd_scratch.push_back({.fixed = vocab * spec_.hidden * element_bytes_});
    }
  }
  writer_.add(std::move(step));
  if (in_place) {
    writer_.add({.kind = OpKind::kLoss, .reads = {logits}, .bwd_saved = {logits}});
    return;
  }
  const int softmax = writer_.saved("loss.softmax", per_token(vocab * kFp32Bytes));
  writer_.storage(softmax).lossy_element_bytes = kFp32Bytes;
  writer_.add(
      {.kind = OpKind::kLoss, .reads = {logits}, .creates = {softmax}, .bwd_saved = {softmax}});
}

MegatronBuilder::Normed MegatronBuilder::norm(OpKind kind, std::string_view which, int input,
                                              bool gemm_only) {
  const int64_t statistics = (spec_.layer_norm ? 2 : 1) * kFp32Bytes;
  const std::string name = "normed_" + std::string(which);
  const Normed made = {
      gemm_only ? gemm_input(name, hidden_bytes_) : writer_.saved(name, hidden_bytes_),
      writer_.constant("rstd_" + std::string(which), sequence_bytes(statistics))};
  writer_.add({.kind = kind,
               .reads = {input},
               .creates = {made.out, made.rstd},
               .bwd_saved = {input, made.rstd}});
  return made;
}

int MegatronBuilder::gemm_input(std::string_view name, ByteFormula bytes, Rebuild rebuild) {
  return keeps_copy_only() ? writer_.unsaved(name, bytes) : writer_.saved(name, bytes, rebuild);
}

MegatronBuilder::Operand MegatronBuilder::operand(int storage, const std::string& name,
                                                  int64_t width, bool rows) {
  if (!options_.fp8_twins) return {storage, {storage}};
  const int64_t bytes = fp8_bytes(width);
  // The residual stream's width is that of a norm's output, split along the sequence.
  const bool split = !rows && gathers() && width == spec_.hidden;
  const ByteFormula formula = rows    ? ByteFormula{.per_row = bytes}
                              : split ? sequence_bytes(bytes)
                                      : per_token(bytes);
  const int copy = writer_.twin(storage, name, formula);
  if (keeps_copy_only()) {
    if (rows) writer_.never_rebuild(copy);  // it would repeat the exchange
    return {copy, {copy}};
  }
  return {copy, {storage, copy}};
}

void MegatronBuilder::add_gemm(MegatronStep step, int64_t gathered_width, int64_t summed_width,
                               int64_t weights) {
  if (options_.transients) {
    if (gathers() && gathered_width > 0) {
      const ByteFormula whole = tokens_of(gathered_width);
      step.fwd_scratch = {whole};         // the gathered input
      step.bwd_scratch = {whole, whole};  // it again, and its gradient before the sum
      if (options_.gather_buffer) {
        step.fwd_scratch.clear();
        step.bwd_scratch.pop_back();
      }
    }
    if (gathers() && summed_width > 0) {
      step.fwd_scratch = {tokens_of(summed_width)};  // the output before the sum
      step.bwd_scratch = step.fwd_scratch;           // its gradient, gathered
    }
    if (options_.weight_gradients) {
      step.bwd_scratch.push_back({.fixed = weights * element_bytes_});
    }
  }
  writer_.add(std::move(step));
}

namespace {

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
  if (options.tp < 1 || spec.heads % options.tp != 0) {
    fail("tp", options.tp, "a divisor of heads = " + std::to_string(spec.heads));
  }
}

}  // namespace

Graph build_megatron_graph(const ModelSpec& spec, const MegatronGraphOptions& options) {
  const int64_t layers =
      options.layer_count == 0 ? spec.layers - options.first_layer : options.layer_count;
  check_options(spec, options, layers);
  return MegatronBuilder(spec, options, layers).build();
}

Graph build_megatron_head(const ModelSpec& spec, const MegatronGraphOptions& options) {
  MegatronGraphOptions alone = options;
  alone.has_embedding = false;
  check_options(spec, alone, 1);
  return MegatronBuilder(spec, alone, 0).build_head();
}

namespace {

/// Rows of one expert from the tokens of one rank, as Megatron computes its capacity.
int64_t capacity(const Job& job) {
  const auto rows = static_cast<double>(job.micro_batch_size * job.seq /
                                        (job.layout.cp * job.layout.tp) * job.model.top_k);
  return static_cast<int64_t>(
      std::ceil(rows / static_cast<double>(job.model.experts) * job.moe.capacity_factor));
}

}  // namespace

int64_t expert_rows(const Job& job, double factor) {
  if (!job.model.has_moe()) return 0;
  const JobLayout& l = job.layout;
  const int64_t local = job.model.experts / l.ep;
  auto rows =
      static_cast<int64_t>(std::ceil(static_cast<double>(job.balanced_rows()) * factor - 1e-6));
  if (job.moe.capacity_factor > 0) {
    const int64_t most = capacity(job) * local * l.ep * l.etp;
    rows = job.moe.pad_to_capacity ? most : std::min(rows, most);
  }
  const int64_t multiple = job.moe.row_multiple;
  if (multiple > 1 && rows > 0) {
    // Each local expert's rows are rounded up: half a multiple more on average.
    rows += local * multiple / 2;
  }
  return rows;
}

MegatronGraphOptions megatron_options(const Job& job) {
  const JobLayout& l = job.layout;
  MegatronGraphOptions options;
  options.micro_batch_size = job.micro_batch_size;
  options.seq = job.seq / l.cp;
  options.ep_size = job.model.has_moe() ? l.ep : 1;
  options.layer_count = 1;
  options.has_embedding = false;
  options.has_head = false;
  options.gate_at_combine = job.model.has_moe() && !job.moe.probs_in_activation;
  options.fp8_twins = job.fp8;
  options.router_probs_element_bytes = job.moe.router_bytes;
  options.tp = l.tp;
  options.sequence_parallel = l.sequence_parallel;
  options.cp = l.cp;
  options.cp_exchanges_heads = job.cp_exchange == CpExchange::kAllToAll;
  options.cp_gathers_keys = job.cp_exchange == CpExchange::kAllGather;
  options.etp = job.model.has_moe() ? l.etp : 1;
  options.element_bytes = job.element_bytes;
  options.attention_unfused = job.attention_unfused;
  options.activation_fused = job.activation_fusion;
  options.attention_dropout = job.attention_dropout;
  options.cross_entropy = job.cross_entropy;
  options.padded_vocab = job.padded_vocab();
  if (job.model.has_moe() && job.moe.pad_to_capacity) {
    options.sent_rows = capacity(job) * job.model.experts;
  }
  options.allgather_dispatch = job.moe.dispatcher == "allgather";
  options.transients = true;
  options.weight_gradients = !job.accumulation_fusion ||
                             (!job.allocator.weight_grad_stand_ins && job.allocator.engine_gemms);
  options.gather_buffer = !job.allocator.engine_gemms;
  return options;
}

}  // namespace bagualu
