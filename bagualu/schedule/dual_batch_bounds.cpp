#include "bagualu/schedule/dual_batch_bounds.h"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace bagualu {
namespace {

bool later_tail(const OneMachineJob& a, const OneMachineJob& b) { return a.tail_ns < b.tail_ns; }

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// By operator: when it starts if its chain runs alone; one more for the end.
std::vector<int64_t> starts(const std::vector<ChainOp>& chain) {
  std::vector<int64_t> start(1, 0);
  for (const ChainOp& op : chain) start.push_back(start.back() + op.ns);
  return start;
}

struct Corner {
  size_t i;
  size_t j;
};

// Both chains advance together from the start of these operators (the diagonal in the plane of
// their progress). Returns the first operators that want one resource at one time, or a chain's
// end.
Corner first_conflict(const std::vector<ChainOp>& forward, const std::vector<ChainOp>& backward,
                      Corner at) {
  int64_t run_i = 0;
  int64_t run_j = 0;
  while (at.i < forward.size() && at.j < backward.size()) {
    const ChainOp& f = forward[at.i];
    const ChainOp& b = backward[at.j];
    // One without duration fits right before the other, but not into the middle of it.
    const bool fits = (f.ns == 0 && run_j == 0) || (b.ns == 0 && run_i == 0);
    if (f.resource == b.resource && !fits) return at;
    const int64_t step = std::min(f.ns - run_i, b.ns - run_j);
    run_i += step;
    run_j += step;
    if (run_i == f.ns) {
      ++at.i;
      run_i = 0;
    }
    if (run_j == b.ns) {
      ++at.j;
      run_j = 0;
    }
  }
  return at;
}

}  // namespace

int64_t jackson_bound_ns(std::vector<OneMachineJob>& jobs) {
  std::sort(jobs.begin(), jobs.end(),
            [](const OneMachineJob& a, const OneMachineJob& b) { return a.head_ns < b.head_ns; });
  std::vector<OneMachineJob> ready;  // a heap, longest tail first; ns is what is left of each
  ready.reserve(jobs.size());
  int64_t now = 0;
  int64_t bound = 0;
  size_t next = 0;
  while (next < jobs.size() || !ready.empty()) {
    if (ready.empty()) now = std::max(now, jobs[next].head_ns);
    for (; next < jobs.size() && jobs[next].head_ns <= now; ++next) {
      ready.push_back(jobs[next]);
      std::push_heap(ready.begin(), ready.end(), later_tail);
    }
    OneMachineJob& first = ready.front();
    const int64_t until = next < jobs.size() ? jobs[next].head_ns : now + first.ns;
    const int64_t run = std::min(first.ns, until - now);
    now += run;
    first.ns -= run;
    if (first.ns > 0) continue;
    bound = std::max(bound, now + first.tail_ns);
    std::pop_heap(ready.begin(), ready.end(), later_tail);
    ready.pop_back();
  }
  return bound;
}

int64_t akers_ns(const std::vector<ChainOp>& forward, const std::vector<ChainOp>& backward) {
  const std::vector<int64_t> x = starts(forward);
  const std::vector<int64_t> y = starts(backward);
  const size_t n = forward.size();
  const size_t m = backward.size();
  // By corner (both chains at an operator's start): the soonest that it is reached.
  std::vector<int64_t> reached((n + 1) * (m + 1), kNever);
  reached[0] = 0;
  int64_t makespan = kNever;
  const auto reach = [&](size_t i, size_t j, size_t to_i, size_t to_j) {
    int64_t& there = reached[to_i * (m + 1) + to_j];
    there = std::min(there, reached[i * (m + 1) + j] + std::max(x[to_i] - x[i], y[to_j] - y[j]));
  };
  for (size_t i = 0; i <= n; ++i) {
    for (size_t j = 0; j <= m; ++j) {
      const int64_t from = reached[i * (m + 1) + j];
      if (from == kNever) continue;
      const Corner hit = first_conflict(forward, backward, {i, j});
      if (hit.i == n || hit.j == m) {
        makespan = std::min(makespan, from + std::max(x[n] - x[i], y[m] - y[j]));
        continue;
      }
      reach(i, j, hit.i, hit.j + 1);
      reach(i, j, hit.i + 1, hit.j);
    }
  }
  return makespan;
}

int64_t precedence_bound_ns(const PrecedenceTimes& times, std::vector<OneMachineJob>& jobs) {
  int64_t bound = times.critical_path_ns();
  for (Resource resource : {Resource::kCompute, Resource::kComm}) {
    if (resource == Resource::kComm && times.comm_is_serial()) continue;  // a path already
    jobs.clear();
    for (int node = 0; node < times.nodes(); ++node) {
      if (times.resource(node) != resource) continue;
      jobs.push_back({times.head_ns(node), times.ns(node), times.tail_ns(node)});
    }
    bound = std::max(bound, jackson_bound_ns(jobs));
  }
  return bound;
}

std::vector<int> critical_subset(const PrecedenceTimes& times) {
  std::vector<int> by_tail;
  for (int node = 0; node < times.nodes(); ++node) {
    if (times.resource(node) == Resource::kCompute) by_tail.push_back(node);
  }
  std::stable_sort(by_tail.begin(), by_tail.end(),
                   [&](int a, int b) { return times.tail_ns(a) > times.tail_ns(b); });
  // The best set has all nodes that start no sooner and end no nearer to the end than its extremes.
  int64_t best = -1;
  int64_t best_head = 0;
  size_t best_last = 0;
  for (int first : by_tail) {
    const int64_t head = times.head_ns(first);
    int64_t load = 0;
    for (size_t last = 0; last < by_tail.size(); ++last) {
      if (times.head_ns(by_tail[last]) < head) continue;
      load += times.ns(by_tail[last]);
      const int64_t bound = head + load + times.tail_ns(by_tail[last]);
      if (bound <= best) continue;
      best = bound;
      best_head = head;
      best_last = last;
    }
  }
  std::vector<int> subset;
  for (size_t k = 0; k < by_tail.size() && k <= best_last; ++k) {
    if (times.head_ns(by_tail[k]) >= best_head) subset.push_back(by_tail[k]);
  }
  return subset;
}

int64_t subset_bound_ns(const PrecedenceTimes& times, const std::vector<int>& subset) {
  if (subset.empty()) return times.critical_path_ns();
  int64_t load = 0;
  int64_t head = kNever;
  int64_t tail = kNever;
  for (int node : subset) {
    load += times.ns(node);
    head = std::min(head, times.head_ns(node));
    tail = std::min(tail, times.tail_ns(node));
  }
  return std::max(times.critical_path_ns(), head + load + tail);
}

int64_t lower_bound_ns(const DualBatchInstance& instance) {
  PrecedenceTimes times;
  times.build(instance);
  std::vector<OneMachineJob> jobs;
  return std::max(precedence_bound_ns(times, jobs), akers_ns(instance.forward, instance.backward));
}

}  // namespace bagualu
