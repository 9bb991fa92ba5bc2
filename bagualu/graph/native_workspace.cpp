#include "bagualu/graph/native_workspace.h"

#include <algorithm>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"

namespace bagualu {
namespace {

constexpr int64_t kFp32Bytes = 4;
constexpr int64_t kBf16Bytes = 2;
// Rows per partial sum of the router's losses, ops::kRouterBlockRows.
constexpr int64_t kRouterBlockRows = 64;

using Phase = std::vector<ByteFormula>;

class Filler {
 public:
  Filler(const ModelSpec& spec, const NativeGraphOptions& options)
      : spec_(spec),
        options_(options),
        bf16_(options.dtype == Dtype::kBf16),
        elem_(dtype_bytes(options.dtype)) {}

  Workspace forward(OpKind kind) const {
    switch (kind) {
      case OpKind::kCoreAttn:
        return hidden(attention_forward_hidden_bytes(spec_, options_));
      case OpKind::kRouter:
        return router_forward();
      case OpKind::kExperts:
        return options_.ep_size > 1 ? one_phase({{.per_piece_row = spec_.hidden * elem_}})
                                    : Workspace{};
      case OpKind::kLmHead:
        return bf16_ ? one_phase({logits()}) : Workspace{};
      default:
        return {};
    }
  }

  Workspace backward(OpKind kind) const {
    const int64_t h = spec_.hidden;
    switch (kind) {
      case OpKind::kQkv:
      case OpKind::kRouter:
      case OpKind::kSharedFc1:
      case OpKind::kSharedFc2:
      case OpKind::kMlpFc1:
        return weight_gradient(kind);  // and nothing else
      case OpKind::kCoreAttn:
        return hidden(attention_backward_hidden_bytes(spec_, options_));
      case OpKind::kAttnProj:
        return one_phase(masked(weight_gradient(h, spec_.q_width())));
      case OpKind::kExperts:
        return experts_backward();
      case OpKind::kMlpFc2:
        return one_phase(masked(weight_gradient(h, spec_.dense_ffn)));
      case OpKind::kLmHead:
        return bf16_ ? one_phase(with(logits(), weight_gradient(spec_.vocab, h))) : Workspace{};
      default:
        return {};
    }
  }

  // Split backward: the gradient that the weight gradient reads later is written where it will be
  // read, not into scratch.
  Workspace input_gradient(OpKind kind) const {
    switch (kind) {
      case OpKind::kRouter:
        return one_phase(router_gradient());
      case OpKind::kExperts:
        return one_phase({{.per_piece_row = spec_.hidden * elem_},
                          {.per_piece_row = spec_.expert_ffn * elem_},
                          {.per_piece_row = kFp32Bytes}});
      default:
        return {};
    }
  }

  Workspace weight_gradient(OpKind kind) const {
    const int64_t h = spec_.hidden;
    switch (kind) {
      case OpKind::kQkv:
        return one_phase(weight_gradient(spec_.qkv_width(), h));
      case OpKind::kAttnProj:
        return one_phase(weight_gradient(h, spec_.q_width()));
      case OpKind::kRouter:
        return one_phase(with_all(router_gradient(), weight_gradient(spec_.experts, h)));
      case OpKind::kExperts:  // fc1's and fc2's one after the other
        return one_phase(weight_gradient(2 * spec_.expert_ffn, h));
      case OpKind::kSharedFc1:
        return one_phase(weight_gradient(2 * spec_.shared_ffn, h));
      case OpKind::kSharedFc2:
        return one_phase(weight_gradient(h, spec_.shared_ffn));
      case OpKind::kMlpFc1:
        return one_phase(weight_gradient(2 * spec_.dense_ffn, h));
      case OpKind::kMlpFc2:
        return one_phase(weight_gradient(h, spec_.dense_ffn));
      default:
        throw InternalError("no split backward of this operator");
    }
  }

 private:
  static Workspace one_phase(Phase phase) {
    Workspace workspace;
    if (!phase.empty()) workspace.phases.push_back(std::move(phase));
    return workspace;
  }

  static Workspace hidden(int64_t bytes) {
    Workspace workspace;
    workspace.hidden_bytes = bytes;
    return workspace;
  }

  static Phase with(const ByteFormula& buffer, Phase phase) {
    phase.insert(phase.begin(), buffer);
    return phase;
  }

  static Phase with_all(Phase buffers, Phase phase) {
    phase.insert(phase.begin(), buffers.begin(), buffers.end());
    return phase;
  }

  // The logits' gradient at the weights' precision.
  Phase router_gradient() const {
    return bf16_ ? Phase{{.per_token = spec_.experts * kBf16Bytes}} : Phase{};
  }

  Phase masked(Phase phase) const {
    return spec_.dropout > 0.0 ? with({.per_token = spec_.hidden * elem_}, std::move(phase))
                               : phase;
  }

  Phase weight_gradient(int64_t out, int64_t in) const {
    return bf16_ ? Phase{{.fixed = out * in * kBf16Bytes}} : Phase{};
  }

  ByteFormula logits() const { return {.per_token = spec_.vocab * kBf16Bytes}; }

  Workspace router_forward() const {
    const int64_t tokens = options_.micro_batch_size * options_.seq;
    const int64_t blocks = round_up(tokens, kRouterBlockRows) / kRouterBlockRows;
    Workspace workspace = one_phase({{.fixed = blocks * (spec_.experts + 1) * kFp32Bytes}});
    if (bf16_) workspace.phases.push_back({{.per_token = spec_.experts * kBf16Bytes}});
    return workspace;
  }

  Workspace experts_backward() const {
    const int64_t f = spec_.expert_ffn;
    Phase phase = {{.per_piece_row = spec_.hidden * elem_},
                   {.per_piece_row = f * elem_},
                   {.per_piece_row = 2 * f * elem_},
                   {.per_piece_row = kFp32Bytes}};
    // Of the two weight gradients, fc1's temporary is the larger one.
    for (const ByteFormula& buffer : weight_gradient(2 * f, spec_.hidden)) phase.push_back(buffer);
    return one_phase(std::move(phase));
  }

  const ModelSpec& spec_;
  const NativeGraphOptions& options_;
  const bool bf16_;
  const int64_t elem_;
};

// Tile sizes of ATen's CPU flash attention.
struct AttentionTile {
  int64_t rows, keys;
};

AttentionTile attention_tile(int64_t seq) {
  const int64_t rows = seq >= 768 ? 256 : seq >= 192 ? 64 : 32;
  return {std::min<int64_t>(rows, seq), std::min<int64_t>(512, seq)};
}

}  // namespace

int64_t attention_forward_hidden_bytes(const ModelSpec& spec, const NativeGraphOptions& options) {
  const auto [rows, keys] = attention_tile(options.seq);
  const int64_t floats = rows * keys + 2 * rows + rows * spec.head_dim;
  int64_t bytes = round_up(options.threads * floats * kFp32Bytes, kAllocationGranularity);
  if (options.dtype == Dtype::kBf16) {
    bytes += round_up(options.threads * rows * keys * kBf16Bytes, kAllocationGranularity);
  }
  return bytes;
}

int64_t attention_backward_hidden_bytes(const ModelSpec& spec, const NativeGraphOptions& options) {
  const auto [rows, keys] = attention_tile(options.seq);
  const int64_t tokens = options.micro_batch_size * options.seq;
  const int64_t elem = dtype_bytes(options.dtype);
  // Scores and their gradient, and in bf16 both once more in half precision.
  const int64_t tile_bytes = 2 * rows * keys * (kFp32Bytes + (elem < kFp32Bytes ? elem : 0));
  const int64_t scratch =
      round_up(options.threads * (tile_bytes + rows * kFp32Bytes), kAllocationGranularity);
  const int64_t gradients = round_up(tokens * spec.q_width() * elem, kAllocationGranularity) +
                            2 * round_up(tokens * spec.kv_width() * elem, kAllocationGranularity);
  return std::max(scratch, gradients);
}

void set_native_workspaces(const ModelSpec& spec, const NativeGraphOptions& options, Graph& graph) {
  const Filler filler(spec, options);
  for (OpSpec& op : graph.ops) {
    op.fwd_workspace = filler.forward(op.kind);
    if (op.has_backward) op.bwd_workspace = filler.backward(op.kind);
    if (!op.has_wgrad) continue;
    op.input_grad_workspace = filler.input_gradient(op.kind);
    op.wgrad_workspace = filler.weight_gradient(op.kind);
  }
}

}  // namespace bagualu
