#include "bagualu/cost/op_flops.h"

#include <string>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr int64_t kFp32Bytes = 4;

OpWork operator+(const OpWork& a, const OpWork& b) {
  return {a.flops + b.flops, a.memory_bytes + b.memory_bytes, a.link_bytes + b.link_bytes};
}

// The pieces that all operators are made of, forward (passes = 1) or backward (passes = 2: the
// gradients of both operands).
struct Parts {
  const ModelSpec& spec;
  const NativeGraphOptions& options;
  const int64_t x;
  const bool backward;
  const int64_t elem = dtype_bytes(options.dtype);

  // `matrices` products of [x, in] with [out, in].
  OpWork gemm(int64_t in, int64_t out, int64_t matrices = 1) const {
    const int64_t passes = backward ? 2 : 1;
    const int64_t weights = matrices * in * out;
    const int64_t weight_bytes = weights * (elem + (backward ? 2 * kFp32Bytes : 0));
    return {passes * 2 * x * in * out, passes * x * (in + out) * elem + weight_bytes, 0};
  }

  // `read` and `written` elements per x, with `flops` each way; backward moves about twice as much.
  OpWork elementwise(int64_t elements, int64_t flops) const {
    const int64_t passes = backward ? 2 : 1;
    return {passes * x * flops, passes * x * elements * elem, 0};
  }

  OpWork norm(int64_t width) const { return elementwise(2 * width, 4 * width); }
  OpWork swiglu(int64_t ffn) const { return elementwise(3 * ffn, 6 * ffn); }

  OpWork core_attention() const {
    // Two products forward, five backward, S/2 keys per token on average.
    const int64_t products = backward ? 5 : 2;
    const int64_t flops = products * x * options.seq * spec.q_width();
    const int64_t widths = spec.qkv_width() + spec.q_width();
    return {flops, (backward ? 2 : 1) * x * widths * elem, 0};
  }

  OpWork router() const {
    return gemm(spec.hidden, spec.experts) +
           OpWork{x * spec.experts * 8, x * spec.experts * kFp32Bytes * 2, 0};
  }

  int64_t wire_row(bool with_weight) const {
    return spec.hidden * elem + (with_weight ? kFp32Bytes : 0);
  }

  // top_k rows of every token between token order and wire order.
  OpWork permute() const {
    return {x * spec.top_k * spec.hidden, x * (spec.top_k + 1) * wire_row(true), 0};
  }

  OpWork exchange(bool with_weight) const {
    const int64_t leaving = x * wire_row(with_weight) / options.ep_size * (options.ep_size - 1);
    return {0, 2 * x * wire_row(with_weight), leaving};
  }

  OpWork experts() const {
    const int64_t local = spec.experts / options.ep_size;
    const int64_t h = spec.hidden, f = spec.expert_ffn;
    return gemm_of_experts(h, 2 * f, local) + swiglu(f) + gemm_of_experts(f, h, local);
  }

  OpWork gemm_of_experts(int64_t in, int64_t out, int64_t local) const {
    // Experts without rows read no weights; with few rows most of them have none.
    return gemm(in, out, x < local ? x : local);
  }

  OpWork work(OpKind kind) const;
};

OpWork Parts::work(OpKind kind) const {
  const int64_t h = spec.hidden;
  switch (kind) {
    case OpKind::kEmbedding:
      return elementwise(2 * h, 0);
    case OpKind::kAttnNorm:
    case OpKind::kMlpNorm:
    case OpKind::kFinalNorm:
      return norm(h);
    case OpKind::kQkv:
      return gemm(h, spec.qkv_width());
    case OpKind::kQkNorm:
      return norm(spec.q_width() + spec.kv_width());
    case OpKind::kCoreAttn:
      return core_attention();
    case OpKind::kAttnProj:
      return gemm(spec.q_width(), h) + elementwise(h, h);
    case OpKind::kRouter:
      return router();
    case OpKind::kDispatchPack:
    case OpKind::kCombineUnpack:
      return permute();
    case OpKind::kDispatch:
      return exchange(true);
    case OpKind::kCombine:
      return exchange(backward);
    case OpKind::kDispatchUnpack:
      return {0, 2 * x * wire_row(true), 0};
    case OpKind::kExperts:
      return experts();
    case OpKind::kSharedFc1:
      return gemm(h, 2 * spec.shared_ffn);
    case OpKind::kSharedAct:
      return swiglu(spec.shared_ffn);
    case OpKind::kSharedFc2:
      return gemm(spec.shared_ffn, h);
    case OpKind::kMlpFc1:
      return gemm(h, 2 * spec.dense_ffn);
    case OpKind::kMlpAct:
      return swiglu(spec.dense_ffn);
    case OpKind::kMlpFc2:
      return gemm(spec.dense_ffn, h) + elementwise(h, h);
    case OpKind::kLmHead:
      return gemm(h, spec.vocab) + OpWork{x * spec.vocab * 4, x * spec.vocab * kFp32Bytes * 3, 0};
    // The half that receives takes what the transfer takes; the other one only issues it.
    case OpKind::kStageRecv:
      return {0, 0, backward ? 0 : x * h * elem};
    case OpKind::kStageSend:
      return {0, 0, backward ? x * h * elem : 0};
    default:  // of the megatron profile, see cost/megatron_cost.h
      throw InternalError("no operator of a native graph: " + std::string(op_kind_name(kind)));
  }
}

}  // namespace

bool scales_with_rows(OpKind kind) {
  switch (kind) {
    case OpKind::kDispatch:
    case OpKind::kDispatchUnpack:
    case OpKind::kExperts:
    case OpKind::kCombine:
    case OpKind::kExpertFc1:
    case OpKind::kMoeAct:
    case OpKind::kExpertFc2:
    case OpKind::kRowCast:
      return true;
    // dispatch_pack and combine_unpack handle this rank's own tokens, top_k rows each.
    default:
      return false;
  }
}

OpWork forward_work(OpKind kind, const ModelSpec& spec, const NativeGraphOptions& options,
                    int64_t x) {
  return Parts{spec, options, x, false}.work(kind);
}

OpWork backward_work(OpKind kind, const ModelSpec& spec, const NativeGraphOptions& options,
                     int64_t x) {
  return Parts{spec, options, x, true}.work(kind);
}

OpWork rebuild_fc1_work(const ModelSpec& spec, const NativeGraphOptions& options, int64_t x) {
  const Parts parts{spec, options, x, false};
  return parts.gemm_of_experts(spec.hidden, 2 * spec.expert_ffn, spec.experts / options.ep_size);
}

OpWork rebuild_act_work(const ModelSpec& spec, const NativeGraphOptions& options, int64_t x) {
  return Parts{spec, options, x, false}.swiglu(spec.expert_ffn);
}

}  // namespace bagualu
