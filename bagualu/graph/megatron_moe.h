#pragma once

#include <cstdint>

#include "bagualu/graph/graph.h"
#include "bagualu/model/job.h"
#include "bagualu/model/model_spec.h"

namespace bagualu {

/// One pipeline stage of a model as Megatron-Core with Transformer Engine trains it in bf16.
struct MegatronGraphOptions {
  int64_t micro_batch_size = 1;  ///< sequences per micro-batch and rank
  int64_t seq = 4096;            ///< tokens per sequence
  int64_t ep_size = 1;           ///< 1: no exchange, rows are a gather and may be recomputed
  int64_t first_layer = 0;       ///< of the stage, in the model
  int64_t layer_count = 0;       ///< of the stage; 0: all from first_layer on
  bool has_embedding = true;     ///< false: the stage receives its input from the stage before
  bool has_head = true;          ///< false: the stage sends its output to the stage behind
  /// Gate weights multiply the returned rows instead of the expert activation: combine then saves
  /// T * top_k rows (Megatron without --moe-apply-probs-on-input or the fused permutation).
  bool gate_at_combine = false;
  /// The wide GEMM inputs (normed_attn, normed_mlp, rows, activation outputs) exist twice: the GEMM
  /// reads an FP8 copy that a cast made of the bf16 storage, and backward reads both copies, so
  /// that neither leaves without a decision. 1 byte per element and an fp32 scale per 128 elements.
  bool fp8_twins = false;
  int64_t router_probs_element_bytes = 2;  ///< 4 with --moe-router-dtype fp32

  // Layouts and variants of a planned job. `seq` is what one context-parallel rank holds.
  int64_t tp = 1;  ///< divides heads (kv heads are shared where there are fewer)
  bool sequence_parallel =
      false;  ///< with tp: residual stream, norms, router and rows sent by 1/tp
  int64_t cp = 1;
  bool cp_exchanges_heads = false;  ///< all-to-all: the output exists on both sides of it
  bool cp_gathers_keys = false;     ///< keys and values of the whole sequence, again in backward
  int64_t etp = 1;                  ///< divides the experts' width; R counts the gathered rows
  int64_t element_bytes = 2;
  bool attention_unfused = false;  ///< scores are kept
  bool activation_fused = true;    ///< else a gated activation keeps its first factor
  double attention_dropout = 0;    ///< with unfused attention: its mask and product are kept
  CrossEntropy cross_entropy = CrossEntropy::kUnfused;
  int64_t padded_vocab = 0;  ///< rows of the head over all tp ranks; 0: the model's vocab
  /// Rows a rank sends in an exchange, the same at every load; 0: its tokens times top_k.
  int64_t sent_rows = 0;
  bool allgather_dispatch = false;  ///< every rank of tp and ep gathers all tokens, sends none
  /// Also what lives inside one forward or backward only and no backward reads: exchanged rows on
  /// both sides of a sort, gathered inputs, gradients being summed, scores of the router, weight
  /// gradients. Without it workspaces are empty.
  bool transients = false;
  /// With transients: a weight's gradient exists for a moment beside the buffer, since the GEMM
  /// does not add to the buffer, or autograd is handed an empty one each time.
  bool weight_gradients = false;
  /// With transients: inputs are gathered into one buffer that is kept (Megatron's own GEMMs).
  bool gather_buffer = false;
  /// GEMMs of the layers and of the head may run their backward in two parts (Note [Split
  /// backward]). Either part has the workspace of both.
  bool split_weight_grads = false;
};

/// The operator graph of the `megatron` implementation profile: what Megatron-Core keeps for
/// backward, storage by storage, for planning only; nothing executes it. Operators are Megatron's,
/// every saved storage is a unit of its own (named as the storage), and intermediates that no
/// backward reads are storages without a unit, so that recomputing what was made from them makes
/// them again.
/// Shapes: docs/design.md, section 4, table of the megatron profile; T = micro_batch_size * seq.
/// Names carry the model's layer number, StorageSpec::layer and loads the stage's (from 0).
/// Workspaces are empty without `transients`; gradients are storages of the size of what they
/// differentiate. Requires: a validated spec. Ensures: finalize() has run. Throws: InvalidInput if
/// the layer range or ep_size does not fit the model. Source: Megatron-Core and Transformer Engine
/// as read by Megatron-MoE-ModelZoo's memory estimate.
Graph build_megatron_graph(const ModelSpec& spec, const MegatronGraphOptions& options);

/// The last norm, the head and the loss alone; their input arrives as a stage's does.
Graph build_megatron_head(const ModelSpec& spec, const MegatronGraphOptions& options);

/// The options that a job's layout and settings imply, for one layer in the middle of a stage.
MegatronGraphOptions megatron_options(const Job& job);

/// Rows an expert-parallel rank receives of a balanced router and of one `factor` times as much;
/// with a capacity, at most what that lets through, and exactly that if rows are padded to it.
int64_t expert_rows(const Job& job, double factor);

}  // namespace bagualu
