// Lower bounds of a dual-batch instance's makespan: what no order can beat.
#pragma once

#include <cstdint>

#include "bagualu/schedule/dual_batch.h"

namespace bagualu {

/// Returns: the largest of the bounds of docs/design.md, "Dual-batch schedules".
int64_t lower_bound_ns(const DualBatchInstance& instance);

}  // namespace bagualu
