#include "bagualu/schedule/schedule_machine.h"

#include <fmt/core.h>

#include <algorithm>

#include "bagualu/base/error.h"

namespace bagualu {

ScheduleTasks::ScheduleTasks(const DualBatchInstance& instance) {
  const auto size = [](const auto& list) { return static_cast<int>(list.size()); };
  const int counts[kTaskKinds] = {size(instance.forward),      size(instance.backward),
                                  size(instance.weight_grads), size(instance.rebuilds),
                                  size(instance.copies_out),   size(instance.copies_in)};
  for (int k = 0; k < kTaskKinds; ++k) {
    first_[k + 1] = first_[k] + counts[k];
    for (int i = 0; i < counts[k]; ++i) {
      tasks_.emplace_back();
      tasks_.back().kind = static_cast<TaskKind>(k);
      tasks_.back().index = i;
    }
  }
  add_chain(TaskKind::kForward, instance.forward);
  add_chain(TaskKind::kBackward, instance.backward);
  add_fillers(instance);
  add_copies(instance);
}

void ScheduleTasks::add_chain(TaskKind kind, const std::vector<ChainOp>& chain) {
  for (int i = 0; i < static_cast<int>(chain.size()); ++i) {
    Task& task = at(kind, i);
    task.ns = chain[i].ns;
    task.resource = chain[i].resource;
    task.host_sync = chain[i].host_sync;
    if (i > 0) task.needs.push_back(number(kind, i - 1));
  }
}

void ScheduleTasks::add_fillers(const DualBatchInstance& instance) {
  for (int k = 0; k < count(TaskKind::kWeightGrad); ++k) {
    Task& task = at(TaskKind::kWeightGrad, k);
    task.ns = instance.weight_grads[k].ns;
    task.needs.push_back(number(TaskKind::kBackward, instance.weight_grads[k].after_backward));
  }
  for (int r = 0; r < count(TaskKind::kRebuild); ++r) {
    at(TaskKind::kRebuild, r).ns = instance.rebuilds[r].ns;
    at(TaskKind::kBackward, instance.rebuilds[r].before_backward)
        .needs.push_back(number(TaskKind::kRebuild, r));
  }
}

void ScheduleTasks::add_copies(const DualBatchInstance& instance) {
  for (int c = 0; c < count(TaskKind::kCopyOut); ++c) {
    const CopyOut& copy = instance.copies_out[c];
    const int self = number(TaskKind::kCopyOut, c);
    tasks_[self].ns = copy.ns;
    tasks_[self].resource = Resource::kD2h;
    tasks_[self].needs.push_back(number(TaskKind::kForward, copy.source_forward));
    if (copy.releases_for_forward >= 0) {
      at(TaskKind::kForward, copy.releases_for_forward).needs.push_back(self);
    }
  }
  for (int c = 0; c < count(TaskKind::kCopyIn); ++c) {
    const CopyIn& copy = instance.copies_in[c];
    const int self = number(TaskKind::kCopyIn, c);
    tasks_[self].ns = copy.ns;
    tasks_[self].resource = Resource::kH2d;
    if (copy.not_before_backward >= 0) {
      tasks_[self].needs.push_back(number(TaskKind::kBackward, copy.not_before_backward));
    }
    at(TaskKind::kBackward, copy.wanted_by_backward).needs.push_back(self);
    if (copy.wanted_by_rebuild >= 0) {
      at(TaskKind::kRebuild, copy.wanted_by_rebuild).needs.push_back(self);
    }
  }
}

std::string ScheduleTasks::text(int task) const {
  return fmt::format("{} {}", task_kind_text(tasks_[task].kind), tasks_[task].index);
}

std::string_view task_kind_text(TaskKind kind) {
  switch (kind) {
    case TaskKind::kForward:
      return "forward";
    case TaskKind::kBackward:
      return "backward";
    case TaskKind::kWeightGrad:
      return "weight gradient";
    case TaskKind::kRebuild:
      return "rebuild";
    case TaskKind::kCopyOut:
      return "copy out";
    case TaskKind::kCopyIn:
      return "copy in";
  }
  throw InternalError("unknown task");
}

std::string_view resource_text(Resource resource) {
  switch (resource) {
    case Resource::kCompute:
      return "compute";
    case Resource::kComm:
      return "communication";
    case Resource::kD2h:
      return "copies out";
    case Resource::kH2d:
      return "copies in";
  }
  throw InternalError("unknown resource");
}

bool ScheduleMachine::run() {
  for (;;) {
    while (end_due() || issue() || start_idle()) {
    }
    int64_t next_ns = INT64_MAX;
    for (int running : running_) {
      if (running >= 0) next_ns = std::min(next_ns, spans_[running].end_ns);
    }
    if (next_ns == INT64_MAX) return ended_count_ == sequence_.size();
    now_ns_ = next_ns;
  }
}

std::vector<std::string> ScheduleMachine::stuck() const {
  std::vector<std::string> found;
  if (host_waits_for_ >= 0) {
    found.push_back("the host waits for ever for " + tasks_.text(host_waits_for_));
  }
  for (const auto& queue : queue_) {
    if (!queue.empty()) found.push_back(tasks_.text(queue.front()) + " waits for ever");
  }
  return found;
}

bool ScheduleMachine::end_due() {
  bool any = false;
  for (int& running : running_) {
    if (running < 0 || spans_[running].end_ns != now_ns_) continue;
    ended_[running] = true;
    ++ended_count_;
    running = -1;
    any = true;
  }
  return any;
}

bool ScheduleMachine::issue() {
  if (host_waits_for_ >= 0 && ended_[host_waits_for_]) host_waits_for_ = -1;
  if (host_waits_for_ >= 0 || next_ == sequence_.size()) return false;
  const int task = sequence_[next_++];
  queue_[static_cast<int>(tasks_[task].resource)].push_back(task);
  if (tasks_[task].host_sync) host_waits_for_ = task;
  return true;
}

bool ScheduleMachine::start_idle() {
  bool any = false;
  for (int r = 0; r < kResourceCount; ++r) {
    if (running_[r] >= 0 || queue_[r].empty()) continue;
    const int task = queue_[r].front();
    const auto& needs = tasks_[task].needs;
    if (!std::all_of(needs.begin(), needs.end(), [this](int need) { return ended_[need]; })) {
      continue;
    }
    queue_[r].pop_front();
    running_[r] = task;
    spans_[task] = {now_ns_, now_ns_ + tasks_[task].ns};
    any = true;
  }
  return any;
}

}  // namespace bagualu
