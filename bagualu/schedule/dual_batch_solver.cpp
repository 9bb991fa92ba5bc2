#include "bagualu/schedule/dual_batch_solver.h"

#include <algorithm>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/schedule/dual_batch_greedy.h"

namespace bagualu {
namespace {

constexpr int64_t kMillion = 1'000'000;
constexpr int kFirstBeam = 2;
// Larger tables cost more than fixed and greedy orders leave to gain.
constexpr size_t kMostStates = 4'000'000;

// Where both chains stand after each `layers` pairs of layers with communication. The backward's
// compute behind its last communication belongs to the window before.
std::vector<LabelModel::Cut> window_cuts(const DualBatchInstance& instance, int layers) {
  const std::vector<ScheduleItem> comm =
      instance.comm_order.empty() ? pinned_comm_order(instance) : instance.comm_order;
  std::vector<LabelModel::Cut> cuts;
  LabelModel::Cut now;
  int pairs = 0;
  int layer = 0;
  for (const ScheduleItem& item : comm) {
    if (item.kind == ItemKind::kForward) {
      now.forward = item.index + 1;
      continue;
    }
    const int own = instance.backward[item.index].layer;
    if (pairs == 0 || own != layer) {
      if (pairs > 0 && pairs % layers == 0) {
        cuts.push_back({now.forward, item.index});
      }
      ++pairs;
    }
    layer = own;
  }
  return cuts;
}

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
  if (!best_.optimal()) offer(greedy_order(instance, times_, state_), ScheduleSource::kGreedy);
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

bool DualBatchSolver::offer(std::vector<ScheduleItem> order, ScheduleSource source) {
  const int64_t makespan = issue_all(*instance_, order, state_);
  if (makespan >= best_.makespan_ns) return false;
  best_.order = std::move(order);
  best_.makespan_ns = makespan;
  best_.source = source;
  return true;
}

void DualBatchSolver::search() {
  best_.bound_ns = std::max(best_.bound_ns, akers_ns(instance_->forward, instance_->backward));
  const size_t ops = instance_->forward.size() + instance_->backward.size();
  if (ops > static_cast<size_t>(options_.fuse_above_ops)) search_fused();
  if (best_.cut_short) return;
  if (!prepare(*instance_, times_)) return;
  search_windows(*instance_, nullptr);
  search_wider(nullptr);
}

void DualBatchSolver::search_fused() {
  const FusedInstance fused = fuse(*instance_);
  if (fused.forward_end.size() + fused.backward_end.size() ==
      instance_->forward.size() + instance_->backward.size()) {
    return;
  }
  fused_times_.build(fused.instance);
  if (!prepare(fused.instance, fused_times_)) return;
  search_windows(fused.instance, &fused);
  search_wider(&fused);
}

bool DualBatchSolver::prepare(const DualBatchInstance& instance, const PrecedenceTimes& times) {
  if (good_enough()) return false;
  return search_.prepare(instance, times, kMostStates);
}

void DualBatchSolver::search_windows(const DualBatchInstance& instance,
                                     const FusedInstance* fused) {
  // With a pinned order states are few and a pass over all is as fast (16 layers: 1.1 ms without
  // windows, 1.3 ms with them; free 16 against 13 ms; shared 2-core machine, 2026-11-30).
  if (!instance.comm_order.empty()) return;
  const std::vector<LabelModel::Cut> cuts = window_cuts(instance, options_.window_layers);
  if (cuts.empty()) return;
  search_.set_cuts(cuts);
  search_pass(kFirstBeam, false, fused);
  search_.set_cuts({});
}

void DualBatchSolver::search_wider(const FusedInstance* fused) {
  if (good_enough()) return;
  const bool all_orders = fused == nullptr;
  if (options_.beam > kFirstBeam && !search_pass(kFirstBeam, all_orders, fused)) return;
  const bool wider = search_pass(options_.beam, all_orders, fused);
  if (!wider || !all_orders || !options_.exact) return;
  search_pass(0, all_orders, fused);
}

// `all_orders`: neither cuts nor fusion left any out, so that the pass proves a bound.
// Returns: whether a wider pass may do better.
bool DualBatchSolver::search_pass(int beam, bool all_orders, const FusedInstance* fused) {
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
    if (fused != nullptr) order = expand(*fused, order);
    const bool better =
        offer(std::move(order), beam > 0 ? ScheduleSource::kBeam : ScheduleSource::kExact);
    BGL_CHECK(better && best_.makespan_ns <= outcome.makespan_ns, best_.makespan_ns,
              outcome.makespan_ns);
  }
  if (!outcome.complete) {
    best_.cut_short = true;
    return false;
  }
  if (all_orders) {
    best_.bound_ns =
        std::max(best_.bound_ns, std::min(best_.makespan_ns, outcome.discarded_bound_ns));
  }
  return outcome.truncated && !good_enough();
}

}  // namespace bagualu
