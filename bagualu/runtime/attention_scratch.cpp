#include "bagualu/runtime/attention_scratch.h"

#include <ATen/ATen.h>

#include "bagualu/base/error.h"
#include "bagualu/runtime/device_arena.h"
#include "bagualu/runtime/ops/attention.h"

namespace bagualu {
namespace {

// Bytes above `before` at the highest moment of `run`, less the bytes of what it returns.
template <class Run>
int64_t scratch_of(DeviceArena& arena, Run&& run) {
  arena.mark_peak();
  const int64_t before = arena.live_bytes();
  const auto result = run();
  return arena.peak_bytes() - before - (arena.live_bytes() - before);
}

}  // namespace

AttentionScratch measure_attention_scratch(const ModelSpec& spec, const TrainShape& shape) {
  DeviceArena* arena = DeviceArena::installed();
  BGL_CHECK(arena != nullptr, "the device arena is not installed");
  const ops::HeadLayout heads{shape.micro_batch_size, shape.seq, spec.heads, spec.kv_heads,
                              spec.head_dim};
  const at::ScalarType dtype = shape.dtype == Dtype::kBf16 ? at::kBFloat16 : at::kFloat;
  const at::Tensor qkv = at::zeros({shape.tokens(), heads.width()}, dtype);
  const at::Tensor q = ops::query_rows(qkv, heads), k = ops::key_rows(qkv, heads),
                   v = ops::value_rows(qkv, heads);
  ops::AttentionResult result;
  const int64_t forward = scratch_of(*arena, [&] {
    result = ops::core_attn_forward(q, k, v, heads);
    return 0;
  });
  const at::Tensor d_out = at::zeros_like(result.out);
  const int64_t backward = scratch_of(*arena, [&] {
    return ops::core_attn_backward(d_out, q, k, v, result.out, result.lse, heads);
  });
  return {forward, backward};
}

}  // namespace bagualu
