// Second opinion on dual-batch schedules: shares no code with the solver or its replay. Runs the
// order as a machine would (an issuing thread, a queue per stream, events in time) instead of
// adding ends up along the order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/schedule/dual_batch.h"

namespace bagualu {

/// Checks that `order` issues every item once, each after what it needs and inside its window, with
/// communication in the pinned order; that nothing waits for ever; and that the machine is done at
/// `claimed_makespan_ns`, which no simple lower bound exceeds.
/// Requires: check_instance(instance) holds.
/// Returns: one line per violation, naming the items; empty if there is none.
std::vector<std::string> verify_schedule(const DualBatchInstance& instance,
                                         const std::vector<ScheduleItem>& order,
                                         int64_t claimed_makespan_ns);

/// As above, for what solve() returned: also that the bound is not above the makespan.
std::vector<std::string> verify_schedule(const DualBatchInstance& instance,
                                         const DualBatchSchedule& schedule);

/// Checks every start and end of `times` against the machine's, one item at a time per resource,
/// and then as verify_schedule().
std::vector<std::string> verify_replay(const DualBatchInstance& instance,
                                       const std::vector<ScheduleItem>& order,
                                       const DualBatchReplay& times);

/// "forward 3", "weight gradient 0".
std::string schedule_item_text(const ScheduleItem& item);

}  // namespace bagualu
