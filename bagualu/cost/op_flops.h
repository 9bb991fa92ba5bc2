#pragma once

#include <cstdint>

#include "bagualu/graph/native_moe.h"

namespace bagualu {

/// Work of one operator: arithmetic, bytes moved through device memory, bytes sent to other ranks.
struct OpWork {
  int64_t flops = 0;
  int64_t memory_bytes = 0;
  int64_t link_bytes = 0;
};

/// True for operators whose work follows the rows received (experts and the exchange around them);
/// false for those that follow the tokens. What x means in OpTime and in OpWork below.
bool scales_with_rows(OpKind kind);

/// Work of an operator at load x (tokens or rows). A multiply-add counts two; a causal attention
/// counts half of the square of scores. Weights are read once, their gradients read and written.
OpWork forward_work(OpKind kind, const ModelSpec& spec, const NativeGraphOptions& options,
                    int64_t x);
OpWork backward_work(OpKind kind, const ModelSpec& spec, const NativeGraphOptions& options,
                     int64_t x);

/// Work of rebuilding one expert intermediate of x rows from what is kept: fc1's product from the
/// rows, the activation from fc1's output.
OpWork rebuild_fc1_work(const ModelSpec& spec, const NativeGraphOptions& options, int64_t x);
OpWork rebuild_act_work(const ModelSpec& spec, const NativeGraphOptions& options, int64_t x);

}  // namespace bagualu
