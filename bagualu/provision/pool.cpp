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
  PoolTolerance tolerance;
  tolerance.relative = 0;
  tolerance.absolute_ns = 0;
  tolerance.max_states = 200'000;
  tolerance.max_work = 20'000'000;
  return tolerance;
}

PoolTolerance PoolTolerance::at_gate() {
  PoolTolerance tolerance;
  tolerance.max_states = 300;
  tolerance.max_work = 5'000;
  tolerance.max_packings = 4;
  tolerance.max_forced = 1;
  tolerance.max_trials = 2'000;
  return tolerance;
}

int64_t link_ns(double ns_per_byte, int64_t bytes) {
  if (bytes <= 0) return 0;
  return static_cast<int64_t>(std::ceil(ns_per_byte * static_cast<double>(bytes)));
}

int64_t overflow_ns(const PoolProblem& problem, int64_t overflow) {
  if (overflow > 0 && overflow > problem.overflow_limit_bytes) {
    return PoolTotals::kInfeasible + overflow - problem.overflow_limit_bytes;
  }
  return link_ns(problem.link_ns_per_byte, overflow);
}

void PoolTotals::load(const PoolProblem& problem, const std::vector<int>& choice) {
  problem_ = &problem;
  choice_ = choice;
  sums_.assign(problem.microbatches.size(), {});
  for (size_t g = 0; g < choice.size(); ++g) {
    sums_[problem.groups[g].microbatch].add(problem.options[choice[g]], 1);
  }
  excess_ = exposed_ = fixed_ = 0;
  for (size_t m = 0; m < sums_.size(); ++m) {
    excess_ += sums_[m].excess(problem.microbatches[m]);
    exposed_ += sums_[m].exposed(problem.microbatches[m]);
    fixed_ += sums_[m].fixed;
  }
}

void PoolTotals::set(int group, int option) {
  const int m = problem_->groups[group].microbatch;
  const PoolMicrobatch& limits = problem_->microbatches[m];
  Sums& sums = sums_[m];
  excess_ -= sums.excess(limits);
  exposed_ -= sums.exposed(limits);
  sums.add(problem_->options[choice_[group]], -1);
  sums.add(problem_->options[option], 1);
  excess_ += sums.excess(limits);
  exposed_ += sums.exposed(limits);
  fixed_ += problem_->options[option].fixed_bytes - problem_->options[choice_[group]].fixed_bytes;
  choice_[group] = option;
}

int64_t PoolTotals::cost_of(int64_t excess, int64_t exposed, int64_t fixed) const {
  const int64_t over = excess - problem_->budget_bytes;
  if (over <= 0) return exposed;
  // Encoded copies cannot go over the link.
  if (over > excess - fixed) return kInfeasible + over - (excess - fixed);
  const int64_t link = overflow_ns(*problem_, over);
  return link >= kInfeasible ? link : exposed + link;
}

int64_t PoolTotals::cost_with(int group, int option) const {
  const int m = problem_->groups[group].microbatch;
  const PoolMicrobatch& limits = problem_->microbatches[m];
  Sums sums = sums_[m];
  const int64_t excess = excess_ - sums.excess(limits), exposed = exposed_ - sums.exposed(limits);
  sums.add(problem_->options[choice_[group]], -1);
  sums.add(problem_->options[option], 1);
  return cost_of(excess + sums.excess(limits), exposed + sums.exposed(limits),
                 fixed_ + sums.fixed - sums_[m].fixed);
}

int64_t PoolTotals::cost_with(int group, int option, int other_group, int other_option) const {
  const int m = problem_->groups[group].microbatch, n = problem_->groups[other_group].microbatch;
  Sums sums[2] = {sums_[m], sums_[n]};
  Sums& other = m == n ? sums[0] : sums[1];
  sums[0].add(problem_->options[choice_[group]], -1);
  sums[0].add(problem_->options[option], 1);
  other.add(problem_->options[choice_[other_group]], -1);
  other.add(problem_->options[other_option], 1);
  int64_t excess = excess_, exposed = exposed_, fixed = fixed_;
  const int touched[2] = {m, n};
  for (int i = 0; i < (m == n ? 1 : 2); ++i) {
    const PoolMicrobatch& limits = problem_->microbatches[touched[i]];
    excess += sums[i].excess(limits) - sums_[touched[i]].excess(limits);
    exposed += sums[i].exposed(limits) - sums_[touched[i]].exposed(limits);
    fixed += sums[i].fixed - sums_[touched[i]].fixed;
  }
  return cost_of(excess, exposed, fixed);
}

int64_t PoolTotals::cost() const { return cost_of(excess_, exposed_, fixed_); }

int64_t PoolTotals::overflow() const {
  return std::max<int64_t>(0, excess_ - problem_->budget_bytes);
}

}  // namespace bagualu
