// Search among the neighbours of an order: passes of one rank change places.
#pragma once

#include "bagualu/schedule/pipeline.h"

namespace bagualu {

struct ExchangeSearch {
  int64_t goal_ns = 0;  ///< a step that is short enough
  int limit = 1;        ///< most activations in flight of a rank
  int tries = 0;        ///< orders that may be simulated
};

/// The shortest step found, by simulated annealing from `order` with a fixed seed; `order` if none
/// is shorter. Places of stages are kept. Requires: order_fault(order) has nothing to say. Cost: at
/// most `tries` simulations
PipelineOrder exchange_passes(const PipelineOrder& order, const PipelineTimes& times,
                              const ExchangeSearch& search);

}  // namespace bagualu
