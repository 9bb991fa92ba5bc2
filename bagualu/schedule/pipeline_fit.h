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

/// No step of a V-shaped order is shorter, if no rank holds more than 2 * pp activations (1F1B's
/// memory on the first rank). Before rank r's first forward of stage 2 pp - 1 - r, a micro-batch
/// has passed all stages before that one, and until then the rank can have done nothing but
/// forwards of stage r, at most 2 pp - 1 of them, since one more place must be free. Shapes: times
/// as [2 * pp][microbatches]
int64_t least_v_step_ns(int pp, int microbatches, const PipelineTimes& times);

/// make_order()'s order, or one with a shorter step for these times, never with more activations in
/// flight. ZB-H1, ZB-H2, ZB-V and V-Half: the best of several lists. If the step of ZB-V, DualPipeV
/// or the interleaved order is then longer than that of 1F1B with the same work on every rank,
/// passes are exchanged as well. 1F1B and DualPipe are as make_order() makes them.
/// Ensures:  no step of ZB-H1 and ZB-H2 is longer than 1F1B's; ZB-V's is where least_v_step_ns() is
///           above 1F1B's, so that no order on a V can match it, and in no other of 60,000 random
///           instances. (Falling back to 1F1B would be no answer: it needs other layers on the
///           ranks.) The others give no promise: DualPipeV is longer in 1 of 4,000, the interleaved
///           order in 92.
/// Shapes:   times as [stages][microbatches], weight_grad_ns given
/// Throws:   InvalidInput as make_order()
/// Cost:     O(passes * pp), measured by BM_FittedOrder; exchanging, about a second
PipelineOrder fitted_order(PipelineKind kind, int pp, int virtual_per_rank, int microbatches,
                           const PipelineTimes& times);

}  // namespace bagualu
