#include "bagualu/schedule/dual_batch_solver.h"

#include <algorithm>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/schedule/dual_batch_greedy.h"

namespace bagualu {
namespace {

constexpr int64_t kMillion = 1'000'000;

}  // namespace

DualBatchSchedule DualBatchSolver::solve(const DualBatchInstance& instance,
                                         const SolveOptions& options) {
  check_instance(instance);
  instance_ = &instance;
  options_ = options;
  deadline_at_ns_ = options.deadline_ns > 0 ? DualBatchSearch::now_ns() + options.deadline_ns : 0;
  labels_left_ = options.max_labels;
  best_ = {};
  times_.build(instance);
  best_.bound_ns = precedence_bound_ns(times_, jobs_);
  best_.order = fixed_order(instance);
  best_.makespan_ns = issue_all(instance, best_.order, state_);
  if (!good_enough()) offer(greedy_order(instance, times_, state_), ScheduleSource::kGreedy);
  if (!good_enough() && options.beam > 0) search();
  return std::move(best_);
}

// What an order has to beat to be worth more search: the best one less the tolerance.
int64_t DualBatchSolver::worthwhile_below_ns() const {
  const int64_t best = best_.makespan_ns;
  const int64_t relative = best / (kMillion + options_.tolerance_ppm) * options_.tolerance_ppm;
  return best - std::max(relative, std::min(options_.tolerance_ns, best - best_.bound_ns));
}

bool DualBatchSolver::good_enough() const { return best_.bound_ns >= worthwhile_below_ns(); }

void DualBatchSolver::offer(std::vector<ScheduleItem> order, ScheduleSource source) {
  const int64_t makespan = issue_all(*instance_, order, state_);
  if (makespan >= best_.makespan_ns) return;
  best_.order = std::move(order);
  best_.makespan_ns = makespan;
  best_.source = source;
}

void DualBatchSolver::search() {
  best_.bound_ns = std::max(best_.bound_ns, akers_ns(instance_->forward, instance_->backward));
  if (good_enough()) return;
  search_.prepare(*instance_, times_);
  constexpr int kFirstBeam = 2;
  if (options_.beam > kFirstBeam && !search_pass(kFirstBeam)) return;
  if (!search_pass(options_.beam) || !options_.exact) return;
  search_pass(0);
}

// Returns: whether a wider pass may do better.
bool DualBatchSolver::search_pass(int beam) {
  SearchLimits limits;
  limits.below_ns = worthwhile_below_ns();
  limits.beam = beam;
  limits.max_labels = labels_left_;
  limits.deadline_at_ns = deadline_at_ns_;
  const SearchOutcome outcome = search_.pass(limits);
  labels_left_ -= outcome.labels;
  if (outcome.found) {
    std::vector<ScheduleItem> order;
    search_.write_order(order);
    const int64_t makespan = issue_all(*instance_, order, state_);
    BGL_CHECK(makespan <= outcome.makespan_ns, makespan, outcome.makespan_ns);
    best_.order = std::move(order);
    best_.makespan_ns = makespan;
    best_.source = beam > 0 ? ScheduleSource::kBeam : ScheduleSource::kExact;
  }
  if (!outcome.complete) return false;
  best_.bound_ns =
      std::max(best_.bound_ns, std::min(best_.makespan_ns, outcome.discarded_bound_ns));
  return !good_enough() && labels_left_ > 0;
}

}  // namespace bagualu
