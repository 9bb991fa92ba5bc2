#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/model/layout.h"
#include "bagualu/model/parameter_layout.h"

namespace bagualu {

/// A storage that lives as long as the trainer.
struct StaticStorage {
  std::string name;   ///< "dense.master", "expert.exp_avg", "layers.2.router_bias", ...
  int64_t bytes = 0;  ///< multiple of 64
};

/// Bytes of one rank that no decision can change.
struct StaticMemory {
  std::vector<StaticStorage> storages;
  int64_t dense_bytes = 0;   ///< parameters every rank holds, with gradients, moments, bf16 copies
  int64_t expert_bytes = 0;  ///< the same for the local experts
  int64_t buffer_bytes = 0;  ///< router biases
  int64_t table_bytes = 0;   ///< what a step works with beside the model, see add_step_tables()

  int64_t total_bytes() const { return dense_bytes + expert_bytes + buffer_bytes + table_bytes; }
};

/// Scalars that the all-reduce of a step sums: losses, squared norm of expert gradients, stop
/// flags.
inline constexpr int64_t kReducedScalars = 8;

/// Per group (dense, expert): fp32 master, gradient, exp_avg, exp_avg_sq, and a bf16 working copy
/// when dtype is bf16; per MoE layer the fp32 router bias. Each storage is rounded up to 64 bytes.
/// Of the virtual stages that pipeline rank `pp_rank` holds.
/// Requires: spec and layout passed validate().
StaticMemory static_memory(const ModelSpec& spec, const ParallelLayout& layout, Dtype dtype,
                           int64_t pp_rank = 0);

/// Adds what lives through every step beside the model's state: rope tables, ids and targets of the
/// micro-batches in flight on the rank (`slots`), counts per expert, the buffers of the count
/// exchange, and one step's tokens. Ids are on the rank of the embedding alone, targets on that of
/// the head.
void add_step_tables(const ModelSpec& spec, const ParallelLayout& layout, const TrainShape& shape,
                     StaticMemory& memory, int64_t pp_rank = 0, int64_t slots = 1);

}  // namespace bagualu
