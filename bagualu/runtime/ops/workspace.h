#pragma once

#include <cstdint>

#include "bagualu/model/layout.h"

/// Exact peak of the temporaries of every operator in this folder on the CPU, outputs preallocated.
/// Free of torch, so that byte predictions can be tested against it.
///
/// Units: bytes; every temporary is rounded up to kStorageGranularityBytes, as the arena counts it.
/// Invariant: no operator allocates anything that is not listed here (tested with a counting
///   allocator for one and two threads). Names that are missing here have no temporary.
namespace bagualu::ops {

/// ATen allocates inside: the bytes depend on threads and shape, `profile` measures them.
inline constexpr int64_t kMeasured = -1;

inline constexpr int64_t kStorageGranularityBytes = 64;

/// Rows per partial sum of the router's losses. Fixed, so that bits do not depend on threads.
inline constexpr int64_t kRouterBlockRows = 64;

/// Elements per partial sum of the gradient norm. Fixed for the same reason.
inline constexpr int64_t kNormBlockElements = 16384;

constexpr int64_t storage_bytes(int64_t bytes) {
  return (bytes + kStorageGranularityBytes - 1) / kStorageGranularityBytes *
         kStorageGranularityBytes;
}

constexpr int64_t element_bytes(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : 2; }

/// Weight gradient of [out, in]: bf16 multiplies into a bf16 temporary, fp32 adds directly.
constexpr int64_t linear_backward_weight_workspace_bytes(int64_t out, int64_t in, Dtype dtype) {
  return dtype == Dtype::kFp32 ? 0 : storage_bytes(out * in * 2);
}

/// One piece of any number of rows: the larger of the two weight gradient temporaries.
constexpr int64_t experts_backward_piece_workspace_bytes(int64_t hidden, int64_t ffn, Dtype dtype) {
  return linear_backward_weight_workspace_bytes(2 * ffn, hidden, dtype);
}

constexpr int64_t router_forward_workspace_bytes(int64_t tokens, int64_t experts, Dtype dtype) {
  const int64_t blocks = (tokens + kRouterBlockRows - 1) / kRouterBlockRows;
  const int64_t partials = storage_bytes(blocks * (experts + 1) * 4);
  // The bf16 logits are freed before the partial sums are made.
  const int64_t logits = dtype == Dtype::kFp32 ? 0 : storage_bytes(tokens * experts * 2);
  return partials > logits ? partials : logits;
}

constexpr int64_t router_backward_workspace_bytes(int64_t tokens, int64_t hidden, int64_t experts,
                                                  Dtype dtype) {
  if (dtype == Dtype::kFp32) return 0;
  return storage_bytes(tokens * experts * 2) +
         linear_backward_weight_workspace_bytes(experts, hidden, dtype);
}

/// Split backward: the rounded gradient of the logits alone.
constexpr int64_t router_input_grad_workspace_bytes(int64_t tokens, int64_t experts, Dtype dtype) {
  return dtype == Dtype::kFp32 ? 0 : storage_bytes(tokens * experts * 2);
}

constexpr int64_t squared_norm_workspace_bytes(int64_t elements) {
  return storage_bytes((elements + kNormBlockElements - 1) / kNormBlockElements * 8);
}

/// The step counter that ATen's fused AdamW wants as a tensor.
constexpr int64_t adamw_workspace_bytes() { return storage_bytes(4); }

}  // namespace bagualu::ops
