// What verify_schedule() runs orders on: the items of an instance as tasks, and a machine with one
// issuing thread and a queue per resource. Shares no code with the solver or its replay.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/schedule/dual_batch.h"

namespace bagualu {

/// Those of ItemKind first, with the same numbers.
enum class TaskKind : uint8_t { kForward, kBackward, kWeightGrad, kRebuild, kCopyOut, kCopyIn };
inline constexpr int kTaskKinds = 6;

struct Task {
  TaskKind kind{};
  int index = 0;
  int64_t ns = 0;
  Resource resource{};
  bool host_sync = false;
  std::vector<int> needs;  ///< tasks that have to end before this one starts
};

/// The instance as tasks with what they need.
class ScheduleTasks {
 public:
  explicit ScheduleTasks(const DualBatchInstance& instance);

  int number(TaskKind kind, int index) const { return first_[static_cast<int>(kind)] + index; }
  int number(const ScheduleItem& item) const {
    return number(static_cast<TaskKind>(item.kind), item.index);
  }
  int count(TaskKind kind) const {
    return first_[static_cast<int>(kind) + 1] - first_[static_cast<int>(kind)];
  }
  int size() const { return static_cast<int>(tasks_.size()); }
  /// Tasks below this number are items of an order, the others copies.
  int items() const { return first_[static_cast<int>(TaskKind::kCopyOut)]; }
  const Task& operator[](int task) const { return tasks_[task]; }
  /// "forward 3", "copy in 0".
  std::string text(int task) const;

 private:
  Task& at(TaskKind kind, int index) { return tasks_[number(kind, index)]; }
  void add_chain(TaskKind kind, const std::vector<ChainOp>& chain);
  void add_fillers(const DualBatchInstance& instance);
  void add_copies(const DualBatchInstance& instance);

  std::vector<Task> tasks_;
  int first_[kTaskKinds + 1] = {};
};

std::string_view task_kind_text(TaskKind kind);
std::string_view resource_text(Resource resource);

/// Runs tasks in the sequence in which they are issued, event by event.
class ScheduleMachine {
 public:
  /// Both outlive the machine.
  ScheduleMachine(const ScheduleTasks& tasks, const std::vector<int>& sequence)
      : tasks_(tasks), sequence_(sequence), spans_(tasks.size()), ended_(tasks.size(), 0) {}

  /// Returns: whether everything issued has ended; if not, stuck() says what waits.
  bool run();
  std::vector<std::string> stuck() const;
  /// By task; those not issued are 0.
  const std::vector<TimeSpan>& spans() const { return spans_; }
  int64_t now_ns() const { return now_ns_; }

 private:
  bool end_due();
  bool issue();
  bool start_idle();

  const ScheduleTasks& tasks_;
  const std::vector<int>& sequence_;
  std::vector<TimeSpan> spans_;
  std::vector<char> ended_;
  size_t ended_count_ = 0;
  size_t next_ = 0;
  int host_waits_for_ = -1;
  int64_t now_ns_ = 0;
  std::deque<int> queue_[kResourceCount];
  int running_[kResourceCount] = {-1, -1, -1, -1};
};

}  // namespace bagualu
