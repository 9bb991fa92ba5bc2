#include "bagualu/provision/pool_closing.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace bagualu {
namespace {

constexpr size_t kMaxCarriedOut = 16;

}  // namespace

void PoolClosing::reserve(const PoolTolerance& tolerance) {
  steps_.resize(static_cast<size_t>(tolerance.max_work) + 1);
  for (auto* states : {&front_, &total_, &next_, &shifted_, &merged_}) {
    states->resize(static_cast<size_t>(4 * tolerance.max_states));
  }
}

bool PoolClosing::close(const PoolProblem& problem, const PoolRelaxation& relaxation,
                        const PoolTolerance& tolerance, PoolTotals& totals, int64_t& bound_ns) {
  problem_ = &problem;
  relaxation_ = &relaxation;
  max_states_ = tolerance.max_states;
  work_left_ = tolerance.max_work;
  bool any_linear = false;
  for (int m = 0; m < static_cast<int>(problem.microbatches.size()); ++m) {
    any_linear = any_linear || relaxation.is_linear(m);
  }
  const bool several = any_linear && problem.microbatches.size() > 1;
  for (const bool join_linear : {true, false}) {
    if (!join_linear && !several) break;
    if (!deepen(join_linear, tolerance, totals, bound_ns)) return false;
    if (totals.cost() - bound_ns <= tolerance.gap_ns(totals.cost())) break;
  }
  return true;
}

// First only what could be as good as the bound and the tolerance promise, then twice as far from
// the bound each time: most of the gap never has to be looked at.
bool PoolClosing::deepen(bool join_linear, const PoolTolerance& tolerance, PoolTotals& totals,
                         int64_t& bound_ns) {
  double depth = 0;
  for (;;) {
    const int64_t known = totals.cost();
    const int64_t accepted = tolerance.gap_ns(known);
    if (known - bound_ns <= accepted) return true;
    // Whole nanoseconds: what is not better by one is not better.
    const double gap =
        static_cast<double>(known - std::max<int64_t>(1, accepted)) - relaxation_->bound();
    if (depth >= gap && depth > 0) return true;
    depth = depth == 0 ? std::max(static_cast<double>(accepted) / 2, gap / 16) : 2 * depth;
    gap_ = std::min(gap, depth);
    complete_ = true;
    if (!search(join_linear)) return false;
    int64_t least_cost = known;
    take_best(totals, least_cost);
    if (!complete_) return false;
    const auto looked_at = static_cast<int64_t>(relaxation_->bound() + gap_);
    bound_ns = std::max(bound_ns, std::min(least_cost, looked_at + 1));
  }
}

bool PoolClosing::search(bool join_linear) {
  steps_.clear();
  steps_.push_back({});
  total_.assign(1, State{});
  if (join_linear) {
    if (!add_groups([&](int m) { return relaxation_->is_linear(m); })) return false;
    fold_linear();
  }
  for (int m = 0; m < static_cast<int>(problem_->microbatches.size()); ++m) {
    if (join_linear && relaxation_->is_linear(m)) continue;
    if (!add_groups([m](int of_group) { return of_group == m; }) || !add_microbatch(m))
      return false;
  }
  return true;
}

int PoolClosing::new_step(const Step& step) {
  steps_.push_back(step);
  return static_cast<int>(steps_.size()) - 1;
}

// front_: every state of the groups of these micro-batches.
template <class Chosen>
bool PoolClosing::add_groups(const Chosen& chosen) {
  State start;
  const int groups = static_cast<int>(problem_->groups.size());
  for (int g = 0; g < groups; ++g) {
    if (!chosen(problem_->groups[g].microbatch)) continue;
    const PoolOption& least = problem_->options[relaxation_->least_option(g)];
    start.bytes += least.bytes;
    start.ns += least.ns;
    start.fixed += least.fixed_bytes;
  }
  start.step = new_step({});
  front_.assign(1, start);
  for (int g = 0; g < groups; ++g) {
    if (chosen(problem_->groups[g].microbatch) && !add_group(g)) return false;
  }
  return true;
}

// Every state once with the group's least option and once with each other one within the gap. Each
// of these lists is in the front's order, so that merging keeps the front sorted.
bool PoolClosing::add_group(int group) {
  const PoolGroup& spec = problem_->groups[group];
  const int least_option = relaxation_->least_option(group);
  const PoolOption& least = problem_->options[least_option];
  bool grown = false;
  for (int o = spec.first_option; o < spec.end_option; ++o) {
    if (o == least_option) continue;
    const double reduced = relaxation_->reduced_cost(group, o);
    if (reduced > gap_) continue;
    if (!grown) next_ = front_;
    grown = true;
    work_left_ -= static_cast<int64_t>(front_.size());
    if (work_left_ < 0) return false;
    const PoolOption& option = problem_->options[o];
    shifted_.clear();
    for (const State& from : front_) {
      if (from.reduced + reduced > gap_) continue;
      State state = from;
      state.bytes += option.bytes - least.bytes;
      state.ns += option.ns - least.ns;
      state.fixed += option.fixed_bytes - least.fixed_bytes;
      state.reduced += reduced;
      state.step = new_step({from.step, -1, group, o});
      shifted_.push_back(state);
    }
    merged_.clear();
    std::merge(next_.begin(), next_.end(), shifted_.begin(), shifted_.end(),
               std::back_inserter(merged_));
    std::swap(next_, merged_);
  }
  if (!grown) return true;
  std::swap(front_, next_);
  keep_pareto(front_);
  limit(front_);
  return true;
}

void PoolClosing::fold_linear() {
  int64_t window = 0, bubble = 0;
  for (int m = 0; m < static_cast<int>(problem_->microbatches.size()); ++m) {
    if (!relaxation_->is_linear(m)) continue;
    window += problem_->microbatches[m].window_bytes;
    bubble += problem_->microbatches[m].bubble_ns;
  }
  total_ = front_;
  for (State& state : total_) {
    state.bytes += state.fixed - window;
    state.fixed = 0;
    state.ns -= bubble;
    state.step = new_step({0, state.step, -1, -1});
  }
}

bool PoolClosing::add_microbatch(int microbatch) {
  const PoolMicrobatch& limits = problem_->microbatches[microbatch];
  next_.clear();
  for (const State& before : total_) {
    for (const State& state : front_) {
      if (before.reduced + state.reduced > gap_) continue;
      if (--work_left_ < 0) return false;
      State sum;
      sum.bytes =
          before.bytes + state.fixed + std::max<int64_t>(0, state.bytes - limits.window_bytes);
      sum.ns = before.ns + std::max<int64_t>(0, state.ns - limits.bubble_ns);
      sum.reduced = before.reduced + state.reduced;
      sum.step = new_step({before.step, state.step, -1, -1});
      next_.push_back(sum);
    }
  }
  std::swap(total_, next_);
  std::sort(total_.begin(), total_.end());
  keep_pareto(total_);
  limit(total_);
  return true;
}

// Requires: `front` is sorted. With encoded copies, of which a window takes none, fewer bytes in
// all may still be the worse state: the search goes on, but proves nothing.
void PoolClosing::keep_pareto(std::vector<State>& front) {
  size_t kept = 0;
  int64_t least_ns = INT64_MAX;
  for (const State& state : front) {
    complete_ = complete_ && state.fixed == 0;
    if (state.ns >= least_ns) continue;
    least_ns = state.ns;
    front[kept++] = state;
  }
  front.resize(kept);
}

// Too many states leave by their reduced cost, and with them the proof.
void PoolClosing::limit(std::vector<State>& front) {
  if (static_cast<int64_t>(front.size()) <= max_states_) return;
  std::nth_element(front.begin(), front.begin() + max_states_, front.end(),
                   [](const State& a, const State& b) {
                     return a.reduced != b.reduced ? a.reduced < b.reduced : a < b;
                   });
  front.resize(static_cast<size_t>(max_states_));
  std::sort(front.begin(), front.end());
  complete_ = false;
}

// What a state promises is a lower bound, so the best ones are carried out until one keeps it.
void PoolClosing::take_best(PoolTotals& totals, int64_t& least_cost) {
  std::vector<std::pair<int64_t, int>> candidates;
  for (const State& state : total_) {
    const int64_t link = overflow_ns(*problem_, state.bytes - problem_->budget_bytes);
    if (link >= PoolTotals::kInfeasible || state.ns + link >= totals.cost()) continue;
    candidates.emplace_back(state.ns + link, state.step);
  }
  std::sort(candidates.begin(), candidates.end());
  if (!candidates.empty()) least_cost = std::min(least_cost, candidates.front().first);
  if (candidates.size() > kMaxCarriedOut) candidates.resize(kMaxCarriedOut);
  PoolTotals trial = totals;
  for (const auto& [promised, step] : candidates) {
    if (promised >= totals.cost()) break;
    restore(step, trial);
    if (trial.cost() < totals.cost()) totals = trial;
  }
}

void PoolClosing::restore(int step, PoolTotals& totals) const {
  for (int g = 0; g < static_cast<int>(problem_->groups.size()); ++g) {
    totals.set(g, relaxation_->least_option(g));
  }
  for (int total = step; total > 0; total = steps_[total].parent) {
    for (int at = steps_[total].other; steps_[at].group >= 0; at = steps_[at].parent) {
      totals.set(steps_[at].group, steps_[at].option);
    }
  }
}

}  // namespace bagualu
