// The steps of solve(), with the memory that they use kept between calls.
#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/schedule/dual_batch.h"
#include "bagualu/schedule/dual_batch_bounds.h"
#include "bagualu/schedule/dual_batch_fuse.h"
#include "bagualu/schedule/dual_batch_issue.h"
#include "bagualu/schedule/dual_batch_search.h"
#include "bagualu/schedule/dual_batch_times.h"

namespace bagualu {

/// Threads: one at a time. Equal calls give equal results, whatever was solved before.
class DualBatchSolver {
 public:
  /// As bagualu::solve().
  DualBatchSchedule solve(const DualBatchInstance& instance, const SolveOptions& options);

 private:
  bool good_enough() const;
  bool offer(std::vector<ScheduleItem> order, ScheduleSource source);
  int64_t worthwhile_below_ns() const;
  void search();
  void search_fused();
  void search_windows(const DualBatchInstance& instance, const FusedInstance* fused);
  void search_wider(const FusedInstance* fused);
  bool search_pass(int beam, bool all_orders, const FusedInstance* fused);
  bool prepare(const DualBatchInstance& instance, const PrecedenceTimes& times);

  const DualBatchInstance* instance_ = nullptr;
  SolveOptions options_;
  int64_t deadline_at_ns_ = 0;
  int64_t labels_left_ = 0;
  DualBatchSchedule best_;
  PrecedenceTimes times_;
  PrecedenceTimes fused_times_;
  IssueState state_;
  DualBatchSearch search_;
  std::vector<OneMachineJob> jobs_;
};

}  // namespace bagualu
