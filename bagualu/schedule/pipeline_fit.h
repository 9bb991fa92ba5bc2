// Orders made for given times: a list scheduler under a memory limit, for stages that are not
// equal.
#pragma once

#include "bagualu/schedule/pipeline.h"

namespace bagualu {

/// Zero-bubble order of one stage per rank, backward split, no rank holding more than
/// `in_flight_limit` activations (from forward to weight gradient) at once. With limits pp and
/// 2 * pp these are the ZB-1p and ZB-2p of Qi et al. 2023; their scheduler is another one.
/// Of several greedy lists the one with the shortest longest span, then the shortest step.
/// Shapes:   times as [pp][microbatches], weight_grad_ns given
/// Requires: in_flight_limit at least 1.
/// Cost:     O(passes * pp) for each list
PipelineOrder zero_bubble_order(int pp, int microbatches, const PipelineTimes& times,
                                int in_flight_limit);

/// make_order()'s order, or a list made for these times under the same number of activations in
/// flight if its step is shorter. Only kinds with a split backward of every pass have lists; the
/// others are as make_order() makes them.
/// Shapes:   times as [stages][microbatches], weight_grad_ns given
/// Throws:   InvalidInput as make_order()
/// Cost:     O(passes * pp), measured by BM_FittedOrder
PipelineOrder fitted_order(PipelineKind kind, int pp, int virtual_per_rank, int microbatches,
                           const PipelineTimes& times);

}  // namespace bagualu
