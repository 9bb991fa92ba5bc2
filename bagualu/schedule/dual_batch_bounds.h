// Lower bounds of a dual-batch instance's makespan: what no order can beat.
#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/schedule/dual_batch.h"
#include "bagualu/schedule/dual_batch_times.h"

namespace bagualu {

/// One item as the one-machine bound sees it: it may start at head_ns, runs ns, and tail_ns of the
/// schedule follow its end.
struct OneMachineJob {
  int64_t head_ns = 0;
  int64_t ns = 0;
  int64_t tail_ns = 0;
};

/// Jackson's preemptive schedule: at every moment the available job with the longest tail runs. No
/// schedule of the jobs on one machine, preemptive or not, ends sooner. Reorders `jobs`.
/// Cost: O(k log k). Source: Carlier 1982, "The one-machine sequencing problem".
int64_t jackson_bound_ns(std::vector<OneMachineJob>& jobs);

/// Shortest makespan of two chains alone (no fillers, copies, host synchronisation or pinned
/// order), each resource running one operator at a time: exact for that relaxation.
/// Cost: O(forward * backward) corners. Source: Akers 1956, "A graphical approach to production
/// scheduling problems".
int64_t akers_ns(const std::vector<ChainOp>& forward, const std::vector<ChainOp>& backward);

/// Nodes of the compute stream that bound the makespan best by themselves: the least head, all
/// their time and the least tail. Source: ours; the set that attains Jackson's bound, kept so that
/// the bound can be had again for other durations without sorting.
std::vector<int> critical_subset(const PrecedenceTimes& times);

/// That bound for any subset of one resource's nodes, and the critical path.
int64_t subset_bound_ns(const PrecedenceTimes& times, const std::vector<int>& subset);

/// Largest of the load of each resource, the critical path and Jackson's bound of the resources
/// whose order is open. `jobs` is scratch.
int64_t precedence_bound_ns(const PrecedenceTimes& times, std::vector<OneMachineJob>& jobs);

/// Returns: the largest of all bounds of this file.
int64_t lower_bound_ns(const DualBatchInstance& instance);

}  // namespace bagualu
