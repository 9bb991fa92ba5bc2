#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "bagualu/model/model_spec.h"

namespace bagualu {

/// Type of activations and of the weights that compute uses; master weights are always fp32.
enum class Dtype { kFp32, kBf16 };

int64_t dtype_bytes(Dtype dtype);
std::string_view dtype_name(Dtype dtype);  ///< "fp32", "bf16"
/// Throws:  InvalidInput(where, field) naming the two names.
Dtype parse_dtype(std::string_view text, const std::string& where, const std::string& field);

/// What one optimizer step of one rank computes.
struct TrainShape {
  int64_t micro_batch_size = 1;  ///< sequences per micro-batch and rank
  int64_t seq = 1;               ///< tokens per sequence
  int64_t microbatches = 1;      ///< micro-batches per optimizer step
  Dtype dtype = Dtype::kFp32;

  int64_t tokens() const { return micro_batch_size * seq; }  ///< T, per micro-batch and rank

  bool operator==(const TrainShape&) const = default;
};

/// How ranks share the work. Every rank holds all dense parameters and sees its own tokens (data
/// parallel over all ranks); experts are split over groups of ep_size neighbouring ranks.
struct ParallelLayout {
  int64_t world_size = 1;
  int64_t ep_size = 1;

  int64_t expert_dp_size() const { return world_size / ep_size; }  ///< copies of each expert
  int64_t ep_rank(int64_t rank) const { return rank % ep_size; }
  int64_t experts_local(const ModelSpec& spec) const { return spec.experts / ep_size; }

  bool operator==(const ParallelLayout&) const = default;
};

/// Most rows one rank's experts can receive from one micro-batch: all tokens of the expert-parallel
/// group, each with as many of its top_k as this rank has experts.
int64_t max_rows(const ModelSpec& spec, const TrainShape& shape, const ParallelLayout& layout);

/// Throws InvalidInput(where) if the three do not fit together: E % ep, world % ep, sizes below 1,
/// or a micro-batch whose row numbers do not fit 32 bits (row maps are int32).
void validate(const ModelSpec& spec, const TrainShape& shape, const ParallelLayout& layout,
              const std::string& where);

/// Throws InvalidInput(where) unless as many ranks were launched as the layout says.
void check_world_size(const ParallelLayout& layout, int64_t launched, const std::string& where);

}  // namespace bagualu
