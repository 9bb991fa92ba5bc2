#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/model/job.h"
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

/// What one virtual stage of the model holds, in the model's own layer numbers.
struct StageSlice {
  int64_t first_layer = 0;
  int64_t layers = 0;
  bool embedding = false;
  bool head = false;  ///< final norm, output matrix and loss

  bool operator==(const StageSlice&) const = default;
};

/// How ranks share the work. The world is pp_size pipeline ranks times dp_size() data-parallel
/// ranks, rank = pp_rank * dp_size() + dp_rank. A pipeline rank holds the dense parameters of its
/// virtual stages, every dp_rank sees its own tokens, and the experts of a stage are split over
/// groups of ep_size neighbouring ranks of that stage.
struct ParallelLayout {
  int64_t world_size = 1;
  int64_t ep_size = 1;
  int64_t pp_size = 1;
  int64_t virtual_per_rank = 1;  ///< virtual stages of a rank; two in V-shaped orders anyway
  PipelineKind pipeline = PipelineKind::k1F1B;
  /// Layers of each virtual stage in the model's order; empty: spread evenly, the last and then the
  /// first lighter where they do not divide (default_stages() of model/job.h).
  std::vector<int64_t> stage_layers;

  int64_t dp_size() const { return world_size / pp_size; }
  int64_t pp_rank(int64_t rank) const { return rank / dp_size(); }
  int64_t dp_rank(int64_t rank) const { return rank % dp_size(); }
  int64_t ep_rank(int64_t rank) const { return dp_rank(rank) % ep_size; }
  int64_t expert_dp_rank(int64_t rank) const { return dp_rank(rank) / ep_size; }
  int64_t expert_dp_size() const { return dp_size() / ep_size; }  ///< copies of each expert
  int64_t experts_local(const ModelSpec& spec) const { return spec.experts / ep_size; }
  int64_t stages_per_rank() const { return virtual_stages_per_rank(pipeline, virtual_per_rank); }
  int64_t stage_count() const { return pp_size * stages_per_rank(); }
  int64_t rank_of_stage(int64_t stage) const {  ///< pp_rank that holds a virtual stage
    return bagualu::rank_of_stage(pipeline, pp_size, stage);
  }
  /// Virtual stages of a pipeline rank, in the model's order.
  std::vector<int64_t> stages_of_rank(int64_t pp_rank) const;

  bool operator==(const ParallelLayout&) const = default;
};

/// Slices of all virtual stages, in the model's order.
/// Requires: validate() passed.
std::vector<StageSlice> stage_slices(const ModelSpec& spec, const ParallelLayout& layout);

/// Slices of the virtual stages that a pipeline rank holds, in the model's order.
std::vector<StageSlice> rank_slices(const ModelSpec& spec, const ParallelLayout& layout,
                                    int64_t pp_rank);

/// Whether a pipeline rank is one of two that hold the embedding's matrix: embeddings are tied, and
/// the first and the last stage lie on different ranks. After the data-parallel sum those two sum
/// its gradient (group "embedding", one per dp_rank); in this order both copies get the same bits.
bool shares_embedding(const ModelSpec& spec, const ParallelLayout& layout, int64_t pp_rank);

/// The model in one piece.
StageSlice whole_model(const ModelSpec& spec);

/// Most rows one rank's experts can receive from one micro-batch: all tokens of the expert-parallel
/// group, each with as many of its top_k as this rank has experts.
int64_t max_rows(const ModelSpec& spec, const TrainShape& shape, const ParallelLayout& layout);

/// Throws InvalidInput(where) if the three do not fit together: E % ep, world % pp, dp % ep, stages
/// that the order of passes does not have, layers of stages that do not add up, sizes below 1, or a
/// micro-batch whose row numbers do not fit 32 bits (row maps are int32).
void validate(const ModelSpec& spec, const TrainShape& shape, const ParallelLayout& layout,
              const std::string& where);

/// Throws InvalidInput(where) unless as many ranks were launched as the layout says.
void check_world_size(const ParallelLayout& layout, int64_t launched, const std::string& where);

}  // namespace bagualu
