// Runs of one resource as one operator: a chain of many small operators offers the search many
// orders that end at nearly the same time.
#pragma once

#include <vector>

#include "bagualu/schedule/dual_batch.h"

namespace bagualu {

struct FusedInstance {
  DualBatchInstance instance;
  // By fused operator: one past the last operator that it stands for.
  std::vector<int> forward_end;
  std::vector<int> backward_end;
};

/// Neighbours of a chain on one resource become one operator. A run ends where fusing could break a
/// rule: behind a host synchronisation and an operator with weight gradients, before one that needs
/// rebuilds, between communication of other chains' turns, between the two ends of a copy; and
/// where waiting for a copy or starting one would move by more than a tenth of the run.
/// Ensures: an order of the fused instance, expanded, is one of `instance` and ends no later there.
FusedInstance fuse(const DualBatchInstance& instance);

/// An order of fused.instance as one of the instance that it was made from.
std::vector<ScheduleItem> expand(const FusedInstance& fused,
                                 const std::vector<ScheduleItem>& order);

}  // namespace bagualu
