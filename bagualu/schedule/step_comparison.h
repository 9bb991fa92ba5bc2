#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/schedule/step_replay.h"

namespace bagualu {

/// A step as its ranks ran it, and as they run the same lists when every part takes its mean time
/// in the steps around it (neighbour_times()). Both are traces: waiting inside events, transfers
/// from their issue.
struct StepComparison {
  int64_t step = 0;
  std::vector<RankStep> executed;
  std::vector<RankStep> scheduled;  ///< times count from the first rank's start
  /// Shapes: by rank and event. The part of the event that waits for what it awaits.
  std::vector<std::vector<int64_t>> executed_wait_ns;
  std::vector<std::vector<int64_t>> scheduled_wait_ns;
  int64_t measured_ns = 0;   ///< from the first rank's start to the last one's end
  int64_t predicted_ns = 0;  ///< the same of `scheduled`
};

struct StepComparisons {
  std::vector<StepComparison> steps;  ///< ascending
  std::vector<int64_t> left_out;      ///< steps that some rank of the trace has not finished
};

/// Every traced step against its replay.
/// Requires: steps as read_step_trace() gives them.
/// Throws:   InvalidInput if members of a transfer are missing from the trace.
/// Cost:     O(steps^2 * events)
StepComparisons compare_steps(const std::vector<RankStep>& steps);

}  // namespace bagualu
