#pragma once

#include <optional>

#include "bagualu/graph/graph.h"
#include "bagualu/model/layout.h"
#include "bagualu/model/model_spec.h"

namespace bagualu {

/// What the native graph depends on besides the model.
struct NativeGraphOptions {
  int64_t micro_batch_size = 1;  ///< sequences per micro-batch and rank
  int64_t seq = 128;             ///< tokens per sequence
  Dtype dtype = Dtype::kFp32;
  int64_t ep_size = 1;
  int64_t threads = 1;  ///< compute threads of the rank: attention's scratch grows with them
  /// The virtual stage to build; none: the whole model.
  std::optional<StageSlice> stage = std::nullopt;
  /// Operators with weights also state their backward in two parts, Note [Split backward].
  bool split_weight_grads = false;
};

/// The operator graph of the `native` implementation profile: the operators of runtime/ops, one
/// micro-batch, one rank, one virtual stage. With ep_size 1 the all-to-alls vanish and the rows
/// sent become a gather of normed_mlp, so they may be recomputed.
/// A stage without the embedding begins with `stage_recv`, one without the head ends with
/// `stage_send`; the stream that leaves is not saved, the one that arrives is.
/// Never split: embedding, norms, and the head, whose weight gradient would have to keep the logits.
/// Shapes: see the table in docs/design.md; T = micro_batch_size * seq.
/// Requires: a validated spec. Ensures: finalize() has run.
/// Throws: InvalidInput if the model has latent attention (MLA), for which there are no operators.
Graph build_native_graph(const ModelSpec& spec, const NativeGraphOptions& options);

}  // namespace bagualu
