#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bagualu/graph/graph.h"
#include "bagualu/graph/pieces.h"
#include "bagualu/model/model_spec.h"
#include "bagualu/runtime/ops/row_map.h"

namespace bagualu {

/// Everything derived from one layer's routed counts: fixed at the gate, used by forward, backward
/// and recompute alike, never rebuilt.
struct LayerRouting {
  ops::ReceivedRows received;
  ops::WireLayout send, send_plain;  ///< token side, with and without the gate weights
  ops::WireLayout recv, recv_plain;  ///< expert side
  std::vector<ExpertPiece> pieces;
  LayerLoad load;
  std::vector<int64_t> rows_per_rank;      ///< by expert-parallel rank
  std::vector<int64_t> tokens_per_expert;  ///< over the expert-parallel group
  double load_imbalance = 1.0;             ///< hottest rank over the mean

  /// Shapes: all_counts [ep_size * E], rank-major: assignments of each source rank to each expert.
  LayerRouting(const std::vector<int64_t>& all_counts, int64_t ep_size, int64_t ep_rank,
               int64_t row_bytes, int64_t chunk_rows);
};

/// A deliberate concentration of routing: the experts of one rank get a bias on their logits, so
/// that this rank receives `factor` times the mean.
struct Spike {
  int64_t hot_rank = 0;
  double factor = 1.0;
};

/// Adds to the logits of the hot rank's experts the bias with which their share of the top-k
/// assignments comes nearest to spike.factor / ep_size; bisection on the local tokens, deterministic.
/// Takes no arena bytes.
/// Shapes: logits fp32 [T, E] on the CPU
void add_spike(const Spike& spike, int64_t top_k, int64_t ep_size, at::Tensor& logits);

/// Assigns experts to tokens so that the counts over all ranks are exactly `counts`: each token gets
/// distinct experts, and every source rank about the same share of every expert.
/// Shapes: counts [E], summing to ep_size * T * top_k, each at most ep_size * T; ids int16 [T, k]
/// Throws: InvalidInput if the counts cannot be met.
void assign_recorded_routing(const std::vector<int64_t>& counts, int64_t ep_size, int64_t ep_rank,
                             at::Tensor& topk_ids);

}  // namespace bagualu
