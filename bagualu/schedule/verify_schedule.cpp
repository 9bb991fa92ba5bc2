#include "bagualu/schedule/verify_schedule.h"

#include <fmt/core.h>

#include <algorithm>

#include "bagualu/schedule/schedule_machine.h"

namespace bagualu {
namespace {

using Violations = std::vector<std::string>;

// --- the order by itself ---

// Copies are not listed in an order: each is issued as soon as what it starts behind is issued, and
// behind the copy before it on its engine.
class CopyIssuer {
 public:
  explicit CopyIssuer(const ScheduleTasks& tasks) : tasks_(tasks) {}

  // Appends the copies that `issued` (by task) allows, and marks them.
  void issue(std::vector<char>& issued, std::vector<int>& sequence) {
    issue_kind(TaskKind::kCopyOut, issued, sequence);
    issue_kind(TaskKind::kCopyIn, issued, sequence);
  }

 private:
  void issue_kind(TaskKind kind, std::vector<char>& issued, std::vector<int>& sequence) {
    int& next = kind == TaskKind::kCopyOut ? next_out_ : next_in_;
    for (; next < tasks_.count(kind); ++next) {
      const int copy = tasks_.number(kind, next);
      for (int need : tasks_[copy].needs) {
        if (!issued[need]) return;
      }
      issued[copy] = true;
      sequence.push_back(copy);
    }
  }

  const ScheduleTasks& tasks_;
  int next_out_ = 0;
  int next_in_ = 0;
};

// Walks the order: every item once, chains and fillers in index order, windows, communication.
class OrderCheck {
 public:
  OrderCheck(const DualBatchInstance& instance, const ScheduleTasks& tasks, Violations& found)
      : instance_(instance),
        tasks_(tasks),
        found_(found),
        issued_(tasks.size(), 0),
        copies_(tasks) {}

  // Returns: everything issued, in order, copies included; what is no item is left out.
  std::vector<int> run(const std::vector<ScheduleItem>& order) {
    copies_.issue(issued_, sequence_);
    for (const ScheduleItem& item : order) {
      if (!is_item(item)) continue;
      check_turn(item);
      check_inputs(item);
      check_lag(item);
      check_lead(item);
      check_communicator(item);
      const int task = tasks_.number(item);
      issued_[task] = true;
      sequence_.push_back(task);
      copies_.issue(issued_, sequence_);
    }
    for (int t = 0; t < tasks_.items(); ++t) {
      if (!issued_[t]) found_.push_back(tasks_.text(t) + " is never issued");
    }
    return std::move(sequence_);
  }

 private:
  bool is_item(const ScheduleItem& item) {
    const auto kind = static_cast<int>(item.kind);
    if (kind > static_cast<int>(ItemKind::kRebuild) || item.index < 0 ||
        item.index >= tasks_.count(static_cast<TaskKind>(kind))) {
      found_.push_back(fmt::format("no such item: kind {}, index {}", kind, item.index));
      return false;
    }
    if (!issued_[tasks_.number(item)]) return true;
    found_.push_back(schedule_item_text(item) + " is issued twice");
    return false;
  }

  void check_turn(const ScheduleItem& item) {
    if (item.index > 0 && !issued_[tasks_.number(item) - 1]) {
      found_.push_back(fmt::format("{} is issued before {}", schedule_item_text(item),
                                   tasks_.text(tasks_.number(item) - 1)));
    }
  }

  // A stream that waits for what comes later, or a thread that waits for the stream, waits for
  // ever.
  void check_inputs(const ScheduleItem& item) {
    const Task& task = tasks_[tasks_.number(item)];
    for (int need : task.needs) {
      if (issued_[need]) continue;
      found_.push_back(fmt::format("{} is issued before {}, which it needs{}",
                                   schedule_item_text(item), tasks_.text(need),
                                   task.host_sync ? ": the host waits for ever" : ""));
    }
  }

  void check_lag(const ScheduleItem& item) {
    if (item.kind == ItemKind::kWeightGrad) return;
    int pending = 0;
    for (int k = 0; k < tasks_.count(TaskKind::kWeightGrad); ++k) {
      const int source = instance_.weight_grads[k].after_backward;
      pending += issued_[tasks_.number(TaskKind::kBackward, source)] &&
                 !issued_[tasks_.number(TaskKind::kWeightGrad, k)];
    }
    if (pending > instance_.weight_lag) {
      found_.push_back(fmt::format("{} is issued while {} weight gradients are pending, at most {}",
                                   schedule_item_text(item), pending, instance_.weight_lag));
    }
  }

  void check_lead(const ScheduleItem& item) {
    if (item.kind != ItemKind::kRebuild) return;
    int next_backward = 0;
    while (next_backward < tasks_.count(TaskKind::kBackward) &&
           issued_[tasks_.number(TaskKind::kBackward, next_backward)]) {
      ++next_backward;
    }
    if (instance_.rebuilds[item.index].before_backward == next_backward) return;
    int leading = 0;
    for (int r = 0; r < tasks_.count(TaskKind::kRebuild); ++r) {
      const int reader = instance_.rebuilds[r].before_backward;
      leading += issued_[tasks_.number(TaskKind::kRebuild, r)] &&
                 !issued_[tasks_.number(TaskKind::kBackward, reader)];
    }
    if (leading >= instance_.rebuild_lead) {
      found_.push_back(fmt::format("{} is issued while {} rebuilds lead, at most {}",
                                   schedule_item_text(item), leading, instance_.rebuild_lead));
    }
  }

  void check_communicator(const ScheduleItem& item) {
    if (instance_.comm_order.empty() || tasks_[tasks_.number(item)].resource != Resource::kComm) {
      return;
    }
    const auto& pinned = instance_.comm_order;
    if (next_comm_ >= pinned.size()) {
      found_.push_back(schedule_item_text(item) + " is not in the pinned order of communication");
    } else if (!(pinned[next_comm_] == item)) {
      found_.push_back(fmt::format("{} is issued where {} is the next communication",
                                   schedule_item_text(item),
                                   schedule_item_text(pinned[next_comm_])));
    }
    ++next_comm_;
  }

  const DualBatchInstance& instance_;
  const ScheduleTasks& tasks_;
  Violations& found_;
  std::vector<char> issued_;
  CopyIssuer copies_;
  std::vector<int> sequence_;
  size_t next_comm_ = 0;
};

// --- bounds that need no search ---

// End of `task` if every resource could run any number of tasks at once.
int64_t longest_path_ns(const ScheduleTasks& tasks, int task, std::vector<int64_t>& known) {
  if (known[task] >= 0) return known[task];
  int64_t start = 0;
  for (int need : tasks[task].needs) start = std::max(start, longest_path_ns(tasks, need, known));
  return known[task] = start + tasks[task].ns;
}

void check_bounds(const ScheduleTasks& tasks, int64_t claimed_ns, Violations& found) {
  int64_t load_ns[kResourceCount] = {};
  for (int t = 0; t < tasks.size(); ++t)
    load_ns[static_cast<int>(tasks[t].resource)] += tasks[t].ns;
  for (int r = 0; r < kResourceCount; ++r) {
    if (claimed_ns < load_ns[r]) {
      found.push_back(fmt::format("a makespan of {} ns is less than the load of {}, {} ns",
                                  claimed_ns, resource_text(static_cast<Resource>(r)), load_ns[r]));
    }
  }
  std::vector<int64_t> known(tasks.size(), -1);
  for (int t = 0; t < tasks.size(); ++t) {
    const int64_t path_ns = longest_path_ns(tasks, t, known);
    if (claimed_ns < path_ns) {
      found.push_back(fmt::format("a makespan of {} ns is less than the longest path to {}, {} ns",
                                  claimed_ns, tasks.text(t), path_ns));
    }
  }
}

// --- claimed times ---

void check_claimed_span(const ScheduleTasks& tasks, int task, const TimeSpan& claimed,
                        const TimeSpan& found, Violations& violations) {
  if (claimed == found) return;
  violations.push_back(fmt::format("{} runs from {} to {} ns, claimed {} to {}", tasks.text(task),
                                   found.start_ns, found.end_ns, claimed.start_ns, claimed.end_ns));
}

// Two items of one resource at the same time; items without length count where they start.
void check_one_at_a_time(const ScheduleTasks& tasks, const std::vector<TimeSpan>& claimed,
                         Violations& found) {
  for (int a = 0; a < tasks.size(); ++a) {
    for (int b = a + 1; b < tasks.size(); ++b) {
      if (tasks[a].resource != tasks[b].resource) continue;
      if (claimed[a].start_ns < claimed[b].end_ns && claimed[b].start_ns < claimed[a].end_ns) {
        found.push_back(
            fmt::format("{} and {} run at the same time", tasks.text(a), tasks.text(b)));
      }
    }
  }
}

// The order run on the machine: spans by task, or violations.
std::vector<TimeSpan> run_order(const DualBatchInstance& instance, const ScheduleTasks& tasks,
                                const std::vector<ScheduleItem>& order, int64_t claimed_ns,
                                Violations& found) {
  const size_t before = found.size();
  const std::vector<int> sequence = OrderCheck(instance, tasks, found).run(order);
  ScheduleMachine machine(tasks, sequence);
  if (!machine.run()) {
    for (std::string& line : machine.stuck()) found.push_back(std::move(line));
  }
  if (found.size() > before) return {};
  if (machine.now_ns() != claimed_ns) {
    found.push_back(fmt::format("the makespan is {} ns, claimed {}", machine.now_ns(), claimed_ns));
  }
  check_bounds(tasks, claimed_ns, found);
  return machine.spans();
}

}  // namespace

std::string schedule_item_text(const ScheduleItem& item) {
  return fmt::format("{} {}", task_kind_text(static_cast<TaskKind>(item.kind)), item.index);
}

std::vector<std::string> verify_schedule(const DualBatchInstance& instance,
                                         const std::vector<ScheduleItem>& order,
                                         int64_t claimed_makespan_ns) {
  Violations found;
  run_order(instance, ScheduleTasks(instance), order, claimed_makespan_ns, found);
  return found;
}

std::vector<std::string> verify_schedule(const DualBatchInstance& instance,
                                         const DualBatchSchedule& schedule) {
  Violations found = verify_schedule(instance, schedule.order, schedule.makespan_ns);
  if (schedule.bound_ns > schedule.makespan_ns) {
    found.push_back(fmt::format("the bound of {} ns is above the makespan, {} ns",
                                schedule.bound_ns, schedule.makespan_ns));
  }
  return found;
}

std::vector<std::string> verify_replay(const DualBatchInstance& instance,
                                       const std::vector<ScheduleItem>& order,
                                       const DualBatchReplay& times) {
  Violations found;
  const ScheduleTasks tasks(instance);
  std::vector<TimeSpan> claimed;
  for (const auto* list : {&times.forward, &times.backward, &times.weight_grads, &times.rebuilds,
                           &times.copies_out, &times.copies_in}) {
    claimed.insert(claimed.end(), list->begin(), list->end());
  }
  if (static_cast<int>(claimed.size()) != tasks.size()) {
    found.push_back(fmt::format("{} times for {} items and copies", claimed.size(), tasks.size()));
    return found;
  }
  check_one_at_a_time(tasks, claimed, found);
  const auto spans = run_order(instance, tasks, order, times.makespan_ns, found);
  for (size_t t = 0; t < spans.size(); ++t) {
    check_claimed_span(tasks, static_cast<int>(t), claimed[t], spans[t], found);
  }
  return found;
}

}  // namespace bagualu
