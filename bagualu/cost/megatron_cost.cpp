#include "bagualu/cost/megatron_cost.h"

#include <algorithm>

#include "bagualu/cost/roofline.h"
#include "bagualu/graph/megatron_writer.h"

namespace bagualu {
namespace {

constexpr int64_t kFp32Bytes = 4;
constexpr int64_t kLargestRows = int64_t{1} << 24;

/// One weight matrix [out, in] that every token or row meets, in `copies` local experts.
struct Gemm {
  int64_t in = 0;
  int64_t out = 0;
  int64_t copies = 1;
};

Gemm gemm_of(OpKind kind, const ModelSpec& spec, const MegatronGraphOptions& options) {
  const int64_t h = spec.hidden;
  const int64_t local = spec.experts / options.ep_size;
  switch (kind) {
    case OpKind::kQkv:
      return {h, spec.qkv_width()};
    case OpKind::kQDown:
      return {h, spec.q_lora_rank};
    case OpKind::kQUp:
      return {spec.q_lora_rank, spec.q_width()};
    case OpKind::kKvDown:
      return {h, spec.kv_down_width()};
    case OpKind::kKvUp:
      return {spec.kv_lora_rank, spec.kv_up_width()};
    case OpKind::kAttnProj:
      return {spec.attn_out_width(), h};
    case OpKind::kRouter:
      return {h, spec.experts};
    case OpKind::kSharedFc1:
      return {h, 2 * spec.shared_ffn};
    case OpKind::kSharedFc2:
      return {spec.shared_ffn, h};
    case OpKind::kMlpFc1:
      return {h, 2 * spec.dense_ffn};
    case OpKind::kMlpFc2:
      return {spec.dense_ffn, h};
    case OpKind::kExpertFc1:
      return {h, 2 * spec.expert_ffn, local};
    case OpKind::kExpertFc2:
      return {spec.expert_ffn, h, local};
    case OpKind::kLmHead:
      return {h, spec.vocab};
    default:
      return {};
  }
}

/// FLOPs of causal attention: per token seq / 2 keys on average, `qk` products as wide as a query,
/// `pv` as wide as a value.
int64_t attention_flops(const ModelSpec& spec, const MegatronGraphOptions& options, int64_t tokens,
                        int64_t qk, int64_t pv) {
  const int64_t widths = qk * spec.q_width() + pv * spec.attn_out_width();
  return tokens * options.seq * widths;
}

int64_t touched_bytes(const Graph& graph, const OpSpec& op, const LayerLoad& load) {
  int64_t bytes = 0;
  for (const auto* list : {&op.reads, &op.creates}) {
    for (int s : *list) bytes += graph.storages[s].bytes.eval(graph.tokens, load);
  }
  return bytes;
}

int64_t sent_bytes(const Graph& graph, const OpSpec& op, const MegatronGraphOptions& options,
                   const LayerLoad& load) {
  if (op.stream != Stream::kComm) return 0;
  // The rows received (dispatch) or returned (combine); the hidden states between two stages.
  const int wire = op.kind == OpKind::kDispatch || op.kind == OpKind::kStageRecv
                       ? op.creates.front()
                       : op.reads.front();
  const int64_t bytes = graph.storages[wire].bytes.eval(graph.tokens, load);
  const bool exchange = op.kind == OpKind::kDispatch || op.kind == OpKind::kCombine;
  return exchange ? bytes / options.ep_size * (options.ep_size - 1) : bytes;
}

OpWork work(const Graph& graph, int id, const ModelSpec& spec, const MegatronGraphOptions& options,
            const LayerLoad& load, bool backward) {
  const OpSpec& op = graph.ops[id];
  const int64_t passes = backward ? 2 : 1;
  const int64_t x = scales_with_rows(op.kind) ? load.rows : graph.tokens;
  const Gemm gemm = gemm_of(op.kind, spec, options);
  // Experts without rows read no weights; with few rows most of them have none.
  const int64_t weights = gemm.in * gemm.out * std::min(gemm.copies, x);
  const int64_t per_weight = kMegatronElementBytes + (backward ? 2 * kFp32Bytes : 0);
  OpWork result;
  result.flops = op.kind == OpKind::kCoreAttn
                     ? attention_flops(spec, options, x, backward ? 3 : 1, backward ? 2 : 1)
                     : passes * 2 * x * gemm.in * gemm.out;
  result.memory_bytes = passes * touched_bytes(graph, op, load) + weights * per_weight;
  result.link_bytes = sent_bytes(graph, op, options, load);
  return result;
}

OpTime time_of(const Graph& graph, int id, const ModelSpec& spec,
               const MegatronGraphOptions& options, const SystemSpec& system, bool backward) {
  const auto at = [&](int64_t rows) {
    return roofline_ns(work(graph, id, spec, options, {.rows = rows}, backward), Dtype::kBf16,
                       system);
  };
  OpTime time;
  time.points.emplace_back(0, at(0));
  if (!scales_with_rows(graph.ops[id].kind)) return time;  // one point: the tokens never change
  for (int64_t rows = 1; rows <= kLargestRows; rows *= 2) time.points.emplace_back(rows, at(rows));
  return time;
}

}  // namespace

OpWork megatron_forward_work(const Graph& graph, int op, const ModelSpec& spec,
                             const MegatronGraphOptions& options, const LayerLoad& load) {
  return work(graph, op, spec, options, load, false);
}

OpWork megatron_backward_work(const Graph& graph, int op, const ModelSpec& spec,
                              const MegatronGraphOptions& options, const LayerLoad& load) {
  return work(graph, op, spec, options, load, true);
}

CostTable megatron_costs(const Graph& graph, const ModelSpec& spec,
                         const MegatronGraphOptions& options, const SystemSpec& system) {
  CostTable costs;
  for (int op = 0; op < static_cast<int>(graph.ops.size()); ++op) {
    costs.forward.push_back(time_of(graph, op, spec, options, system, false));
    costs.backward.push_back(
        graph.ops[op].has_backward ? time_of(graph, op, spec, options, system, true) : OpTime{});
  }
  costs.rebuild.resize(graph.units.size());
  set_copy_rates(system, costs);
  return costs;
}

}  // namespace bagualu
