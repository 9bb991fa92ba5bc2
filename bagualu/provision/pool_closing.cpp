#include "bagualu/provision/pool_closing.h"

#include <algorithm>
#include <iterator>

namespace bagualu {

bool PoolClosing::close(const PoolProblem& problem, const PoolRelaxation& relaxation,
                        const PoolTolerance& tolerance, PoolTotals& totals, int64_t& bound_ns) {
  problem_ = &problem;
  relaxation_ = &relaxation;
  const int64_t known = totals.cost();
  // Whole nanoseconds: what is not better by one is not better.
  const int64_t wanted = known - std::max<int64_t>(1, tolerance.gap_ns(known));
  gap_ = static_cast<double>(wanted) - relaxation.bound();
  max_states_ = tolerance.max_states;
  work_left_ = tolerance.max_work;
  complete_ = true;
  states_.clear();
  total_.clear();
  states_.push_back({});
  total_.push_back(0);
  int group = 0;
  const int groups = static_cast<int>(problem.groups.size());
  for (int m = 0; m < static_cast<int>(problem.microbatches.size()); ++m) {
    State start;
    for (int g = group; g < groups && problem.groups[g].microbatch == m; ++g) {
      const PoolOption& least = problem.options[relaxation.least_option(g)];
      start.bytes += least.bytes;
      start.ns += least.ns;
    }
    front_.assign(1, static_cast<int>(states_.size()));
    states_.push_back(start);
    for (; group < groups && problem.groups[group].microbatch == m; ++group) {
      if (!add_group(group)) return false;
    }
    if (!add_microbatch(m)) return false;
  }
  int best = -1;
  int64_t best_cost = known;
  for (int index : total_) {
    const State& state = states_[index];
    const int64_t link = overflow_ns(problem, state.bytes - problem.budget_bytes);
    if (link >= PoolTotals::kInfeasible || state.ns + link >= best_cost) continue;
    best_cost = state.ns + link;
    best = index;
  }
  if (best >= 0) restore(best, totals);
  if (complete_) bound_ns = std::max(bound_ns, std::min(best_cost, wanted + 1));
  return complete_;
}

// Every state once with the group's least option and once with each other one within the gap. Each of
// these lists is in the front's order, so that merging keeps the front sorted.
bool PoolClosing::add_group(int group) {
  const PoolGroup& spec = problem_->groups[group];
  const int least_option = relaxation_->least_option(group);
  const PoolOption& least = problem_->options[least_option];
  next_ = front_;
  for (int o = spec.first_option; o < spec.end_option; ++o) {
    if (o == least_option) continue;
    const double reduced = relaxation_->reduced_cost(group, o);
    if (reduced > gap_) continue;
    work_left_ -= static_cast<int64_t>(front_.size());
    if (work_left_ < 0) return false;
    const PoolOption& option = problem_->options[o];
    shifted_.clear();
    for (int index : front_) {
      const State from = states_[index];
      if (from.reduced + reduced > gap_) continue;
      State state;
      state.bytes = from.bytes + option.bytes - least.bytes;
      state.ns = from.ns + option.ns - least.ns;
      state.reduced = from.reduced + reduced;
      state.parent = index;
      state.option = o;
      state.group = group;
      shifted_.push_back(static_cast<int>(states_.size()));
      states_.push_back(state);
    }
    merged_.clear();
    std::merge(next_.begin(), next_.end(), shifted_.begin(), shifted_.end(),
               std::back_inserter(merged_), [this](int a, int b) { return before(a, b); });
    std::swap(next_, merged_);
  }
  if (next_.size() == front_.size()) return true;
  std::swap(front_, next_);
  keep_pareto(front_);
  limit(front_);
  return true;
}

bool PoolClosing::add_microbatch(int microbatch) {
  const PoolMicrobatch& limits = problem_->microbatches[microbatch];
  next_.clear();
  for (int before : total_) {
    for (int index : front_) {
      if (states_[before].reduced + states_[index].reduced > gap_) continue;
      if (--work_left_ < 0) return false;
      State state;
      state.bytes =
          states_[before].bytes + std::max<int64_t>(0, states_[index].bytes - limits.window_bytes);
      state.ns = states_[before].ns + std::max<int64_t>(0, states_[index].ns - limits.bubble_ns);
      state.reduced = states_[before].reduced + states_[index].reduced;
      state.parent = before;
      state.other = index;
      next_.push_back(static_cast<int>(states_.size()));
      states_.push_back(state);
    }
  }
  std::swap(total_, next_);
  std::sort(total_.begin(), total_.end(), [this](int a, int b) { return before(a, b); });
  keep_pareto(total_);
  limit(total_);
  return true;
}

bool PoolClosing::before(int a, int b) const {
  const State &x = states_[a], &y = states_[b];
  if (x.bytes != y.bytes) return x.bytes < y.bytes;
  return x.ns != y.ns ? x.ns < y.ns : a < b;
}

// Requires: `front` is sorted.
void PoolClosing::keep_pareto(std::vector<int>& front) {
  size_t kept = 0;
  int64_t least_ns = INT64_MAX;
  for (int index : front) {
    if (states_[index].ns >= least_ns) continue;
    least_ns = states_[index].ns;
    front[kept++] = index;
  }
  front.resize(kept);
}

// Too many states leave by their reduced cost, and with them the proof.
void PoolClosing::limit(std::vector<int>& front) {
  if (static_cast<int64_t>(front.size()) <= max_states_) return;
  std::nth_element(front.begin(), front.begin() + max_states_, front.end(), [this](int a, int b) {
    const State &x = states_[a], &y = states_[b];
    return x.reduced != y.reduced ? x.reduced < y.reduced : a < b;
  });
  front.resize(static_cast<size_t>(max_states_));
  std::sort(front.begin(), front.end(), [this](int a, int b) { return before(a, b); });
  complete_ = false;
}

void PoolClosing::restore(int state, PoolTotals& totals) const {
  for (int g = 0; g < static_cast<int>(problem_->groups.size()); ++g) {
    totals.set(g, relaxation_->least_option(g));
  }
  for (int total = state; total > 0; total = states_[total].parent) {
    for (int at = states_[total].other; states_[at].group >= 0; at = states_[at].parent) {
      totals.set(states_[at].group, states_[at].option);
    }
  }
}

}  // namespace bagualu
