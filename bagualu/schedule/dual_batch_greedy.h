// List schedule by longest tail: cheap, and the order that a search has to beat.
#pragma once

#include <vector>

#include "bagualu/schedule/dual_batch.h"

namespace bagualu {

/// Issues, again and again, the item that can start first; of several the chain operator with the
/// longest rest of its chain, fillers last (weight gradients before rebuilds).
/// Requires: check_instance().
std::vector<ScheduleItem> greedy_order(const DualBatchInstance& instance);

}  // namespace bagualu
