// List schedule by longest tail: cheap, and the order that a search has to beat.
#pragma once

#include <vector>

#include "bagualu/schedule/dual_batch.h"
#include "bagualu/schedule/dual_batch_issue.h"
#include "bagualu/schedule/dual_batch_times.h"

namespace bagualu {

/// Issues, again and again, the item that can start first; of several the one with the longest path
/// from its start to the end of the schedule.
/// Requires: check_instance().
std::vector<ScheduleItem> greedy_order(const DualBatchInstance& instance);
/// The same; `times` are the instance's, `state` ends behind the order.
std::vector<ScheduleItem> greedy_order(const DualBatchInstance& instance,
                                       const PrecedenceTimes& times, IssueState& state);

}  // namespace bagualu
