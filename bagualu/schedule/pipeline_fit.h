// Orders made for given times: a list scheduler under a memory limit, for stages that are not
// equal.
#pragma once

#include "bagualu/schedule/pipeline.h"

namespace bagualu {

/// What a list may hold on each rank, in any unit of memory.
struct HoldLimit {
  int64_t limit = 1;
  int64_t activation = 1;   ///< held from a forward to its input gradient
  int64_t weight_grad = 1;  ///< of it, still held from there to the weight gradient
};

/// Zero-bubble order of one stage per rank, backward split, no rank holding more than the limit.
/// With limits of pp and 2 * pp activations these are the ZB-1p and ZB-2p of Qi et al. 2023; their
/// scheduler is another one. Of several greedy lists and, where they fit, ZB-H1 and ZB-H2, the one
/// with the shortest longest span, then the shortest step.
/// Shapes:   times as [pp][microbatches], weight_grad_ns given
/// Requires: activation <= limit, 0 <= weight_grad <= activation.
/// Cost:     O(passes * pp) for each list
PipelineOrder zero_bubble_order(int pp, int microbatches, const PipelineTimes& times,
                                const HoldLimit& hold);

/// make_order()'s order, or a list made for these times under the same number of activations in
/// flight if its step is shorter. Only kinds with a split backward of every pass have lists; the
/// others are as make_order() makes them.
/// Shapes:   times as [stages][microbatches], weight_grad_ns given
/// Throws:   InvalidInput as make_order()
/// Cost:     O(passes * pp), measured by BM_FittedOrder
PipelineOrder fitted_order(PipelineKind kind, int pp, int virtual_per_rank, int microbatches,
                           const PipelineTimes& times);

}  // namespace bagualu
