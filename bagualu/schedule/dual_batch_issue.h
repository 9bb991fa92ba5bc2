// Issues an instance's items one by one and keeps when everything runs; the replay, the greedy
// order and the search's last word on makespans stand on it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "bagualu/schedule/dual_batch.h"

namespace bagualu {

/// State after a prefix of an order. A reset() on an instance of a size seen before allocates
/// nothing.
class IssueState {
 public:
  /// The instance must live as long as this is used with it.
  void reset(const DualBatchInstance& instance);

  /// Whether the next item of `kind` may be issued: it exists, its inputs are issued, the windows
  /// and the pinned communication order allow it.
  bool can_issue(ItemKind kind) const;
  /// When it would start; requires can_issue().
  int64_t start_ns(ItemKind kind) const;
  /// Issues it and every copy that thereby is ready. Requires can_issue().
  void issue(ItemKind kind);

  int next(ItemKind kind) const { return next_[static_cast<size_t>(kind)]; }
  bool done() const { return issued_ == items_; }
  int64_t makespan_ns() const { return makespan_ns_; }
  int64_t stream_ns(Resource resource) const { return free_ns_[static_cast<size_t>(resource)]; }
  int64_t host_ns() const { return host_ns_; }
  std::span<const TimeSpan> spans(ItemKind kind) const { return spans_[static_cast<size_t>(kind)]; }
  std::span<const TimeSpan> copies_out() const { return copies_out_; }
  std::span<const TimeSpan> copies_in() const { return copies_in_; }

 private:
  const ChainOp& chain_op(ItemKind kind) const;
  bool comm_allows(ItemKind kind) const;
  void run_copies_out();
  void run_copies_in();
  TimeSpan run(Resource resource, int64_t ready_ns, int64_t duration_ns);

  const DualBatchInstance* instance_ = nullptr;
  std::array<int, 4> next_{};
  std::array<int64_t, kResourceCount> free_ns_{};
  int64_t host_ns_ = 0;
  int64_t makespan_ns_ = 0;
  int items_ = 0;
  int issued_ = 0;
  int comm_issued_ = 0;
  int out_issued_ = 0;
  int in_issued_ = 0;
  int in_awaited_ = 0;  ///< copies in below this one are waited for by issued backward operators
  int rebuilds_consumed_ = 0;  ///< rebuilds of issued backward operators
  int grads_ready_ = 0;        ///< weight gradients whose backward operator is issued
  std::array<std::vector<TimeSpan>, 4> spans_;
  std::vector<TimeSpan> copies_out_;
  std::vector<TimeSpan> copies_in_;
  std::vector<int> released_by_;  ///< by forward operator: copy out it waits for, or -1
  std::vector<int> filled_by_;    ///< by rebuild: last copy in it waits for, or -1
};

/// Issues a whole order. Returns its makespan; `state` says when everything runs.
/// Throws: InternalError if the order is none of this instance, see replay().
int64_t issue_all(const DualBatchInstance& instance, const std::vector<ScheduleItem>& order,
                  IssueState& state);

}  // namespace bagualu
