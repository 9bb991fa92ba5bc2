#include "bagualu/provision/pool.h"

#include <algorithm>
#include <cmath>

namespace bagualu {

void PoolProblem::clear() {
  options.clear();
  groups.clear();
  microbatches.clear();
  budget_bytes = 0;
  link_ns_per_byte = 0;
  overflow_limit_bytes = 0;
}

int64_t PoolTolerance::gap_ns(int64_t cost_ns) const {
  return std::max(absolute_ns, static_cast<int64_t>(relative * static_cast<double>(cost_ns)));
}

PoolTolerance PoolTolerance::exact() {
  return {.relative = 0, .absolute_ns = 0, .max_states = 200'000, .max_work = 20'000'000};
}

int64_t overflow_ns(const PoolProblem& problem, int64_t overflow) {
  if (overflow <= 0) return 0;
  if (overflow > problem.overflow_limit_bytes) return PoolTotals::kInfeasible;
  return static_cast<int64_t>(std::ceil(problem.link_ns_per_byte * static_cast<double>(overflow)));
}

void PoolTotals::load(const PoolProblem& problem, const std::vector<int>& choice) {
  problem_ = &problem;
  choice_ = choice;
  sums_.assign(problem.microbatches.size(), {});
  for (size_t g = 0; g < choice.size(); ++g) {
    Sums& sums = sums_[problem.groups[g].microbatch];
    sums.bytes += problem.options[choice[g]].bytes;
    sums.ns += problem.options[choice[g]].ns;
  }
  excess_ = exposed_ = 0;
  for (size_t m = 0; m < sums_.size(); ++m) {
    excess_ += std::max<int64_t>(0, sums_[m].bytes - problem.microbatches[m].window_bytes);
    exposed_ += std::max<int64_t>(0, sums_[m].ns - problem.microbatches[m].bubble_ns);
  }
}

void PoolTotals::set(int group, int option) {
  const int m = problem_->groups[group].microbatch;
  const PoolMicrobatch& limits = problem_->microbatches[m];
  const PoolOption& old = problem_->options[choice_[group]];
  const PoolOption& now = problem_->options[option];
  Sums& sums = sums_[m];
  excess_ -= std::max<int64_t>(0, sums.bytes - limits.window_bytes);
  exposed_ -= std::max<int64_t>(0, sums.ns - limits.bubble_ns);
  sums.bytes += now.bytes - old.bytes;
  sums.ns += now.ns - old.ns;
  excess_ += std::max<int64_t>(0, sums.bytes - limits.window_bytes);
  exposed_ += std::max<int64_t>(0, sums.ns - limits.bubble_ns);
  choice_[group] = option;
}

int64_t PoolTotals::cost_of(int64_t excess, int64_t exposed) const {
  const int64_t over = excess - problem_->budget_bytes;
  if (over <= 0) return exposed;
  const int64_t link = overflow_ns(*problem_, over);
  return link >= kInfeasible ? kInfeasible : exposed + link;
}

int64_t PoolTotals::cost_with(int group, int option) const {
  const int m = problem_->groups[group].microbatch;
  const PoolMicrobatch& limits = problem_->microbatches[m];
  const PoolOption& old = problem_->options[choice_[group]];
  const PoolOption& now = problem_->options[option];
  const Sums& sums = sums_[m];
  const int64_t bytes = sums.bytes + now.bytes - old.bytes, ns = sums.ns + now.ns - old.ns;
  return cost_of(excess_ - std::max<int64_t>(0, sums.bytes - limits.window_bytes) +
                     std::max<int64_t>(0, bytes - limits.window_bytes),
                 exposed_ - std::max<int64_t>(0, sums.ns - limits.bubble_ns) +
                     std::max<int64_t>(0, ns - limits.bubble_ns));
}

int64_t PoolTotals::cost_with(int group, int option, int other_group, int other_option) const {
  int64_t excess = excess_, exposed = exposed_;
  Sums changed[2];
  const int m[2] = {problem_->groups[group].microbatch, problem_->groups[other_group].microbatch};
  const int g[2] = {group, other_group}, o[2] = {option, other_option};
  for (int i = 0; i < 2; ++i) {
    const PoolOption& old = problem_->options[choice_[g[i]]];
    const PoolOption& now = problem_->options[o[i]];
    Sums& target = m[i] == m[0] ? changed[0] : changed[1];
    target.bytes += now.bytes - old.bytes;
    target.ns += now.ns - old.ns;
  }
  for (int i = 0; i < (m[0] == m[1] ? 1 : 2); ++i) {
    const PoolMicrobatch& limits = problem_->microbatches[m[i]];
    const Sums& sums = sums_[m[i]];
    excess += std::max<int64_t>(0, sums.bytes + changed[i].bytes - limits.window_bytes) -
              std::max<int64_t>(0, sums.bytes - limits.window_bytes);
    exposed += std::max<int64_t>(0, sums.ns + changed[i].ns - limits.bubble_ns) -
               std::max<int64_t>(0, sums.ns - limits.bubble_ns);
  }
  return cost_of(excess, exposed);
}

int64_t PoolTotals::cost() const { return cost_of(excess_, exposed_); }

int64_t PoolTotals::overflow() const {
  return std::max<int64_t>(0, excess_ - problem_->budget_bytes);
}

}  // namespace bagualu
