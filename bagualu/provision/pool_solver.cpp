#include "bagualu/provision/pool_solver.h"

#include <algorithm>

namespace bagualu {
namespace {

constexpr int kMaxRounds = 12;
constexpr int kMaxSweeps = 8;
constexpr size_t kMaxExchangeMoves = 32;

}  // namespace

void PoolSolver::solve(const PoolProblem& problem, const PoolTolerance& tolerance,
                       PoolSolution& solution) {
  relaxation_.solve(problem);
  solution.missing_bytes = relaxation_.missing_bytes();
  solution.closed = false;
  solution.ns_per_byte = relaxation_.lambda();
  totals_.load(problem, relaxation_.rounded());
  solution.bound_ns = relaxation_.bound_ns();
  if (relaxation_.feasible()) {
    const auto good_enough = [&] {
      return totals_.cost() < PoolTotals::kInfeasible &&
             totals_.cost() - solution.bound_ns <= tolerance.gap_ns(totals_.cost());
    };
    // With encoded copies the rounded relaxation may not fit yet: a window takes none of them.
    for (int round = 0; round < kMaxSweeps && totals_.cost() >= PoolTotals::kInfeasible; ++round) {
      if (!sweep()) break;
    }
    for (int round = 0; round < kMaxRounds; ++round) {
      if (good_enough() || (!best_single_move() && !best_exchange())) break;
    }
    if (!good_enough()) {
      solution.closed = closing_.close(problem, relaxation_, tolerance, totals_, solution.bound_ns);
    }
  }
  solution.choice = totals_.choice();
  solution.cost_ns = totals_.cost();
  solution.feasible = solution.cost_ns < PoolTotals::kInfeasible;
  solution.overflow_bytes = totals_.overflow();
}

// The best option of every group in turn.
bool PoolSolver::sweep() {
  const PoolProblem& problem = totals_.problem();
  bool changed = false;
  for (int g = 0; g < static_cast<int>(problem.groups.size()); ++g) {
    int64_t best_cost = totals_.cost();
    int best_option = -1;
    for (int o = problem.groups[g].first_option; o < problem.groups[g].end_option; ++o) {
      const int64_t cost = totals_.cost_with(g, o);
      if (cost >= best_cost) continue;
      best_cost = cost;
      best_option = o;
    }
    if (best_option < 0) continue;
    totals_.set(g, best_option);
    changed = true;
  }
  return changed;
}

bool PoolSolver::best_single_move() {
  const PoolProblem& problem = totals_.problem();
  int64_t best_cost = totals_.cost();
  int best_group = -1, best_option = -1;
  for (int g = 0; g < static_cast<int>(problem.groups.size()); ++g) {
    for (int o = problem.groups[g].first_option; o < problem.groups[g].end_option; ++o) {
      if (o == totals_.choice()[g]) continue;
      const int64_t cost = totals_.cost_with(g, o);
      if (cost >= best_cost) continue;
      best_cost = cost;
      best_group = g;
      best_option = o;
    }
  }
  if (best_group < 0) return false;
  totals_.set(best_group, best_option);
  return true;
}

// Only options whose reduced cost is below the gap can be part of something better.
bool PoolSolver::best_exchange() {
  const PoolProblem& problem = totals_.problem();
  const double gap = static_cast<double>(totals_.cost()) - relaxation_.bound();
  moves_.clear();
  for (int g = 0; g < static_cast<int>(problem.groups.size()); ++g) {
    for (int o = problem.groups[g].first_option; o < problem.groups[g].end_option; ++o) {
      if (o == totals_.choice()[g]) continue;
      const double reduced = relaxation_.reduced_cost(g, o);
      if (reduced <= gap) moves_.push_back({reduced, g, o});
    }
  }
  if (moves_.size() > kMaxExchangeMoves) {
    std::nth_element(moves_.begin(), moves_.begin() + kMaxExchangeMoves, moves_.end());
    moves_.resize(kMaxExchangeMoves);
  }
  int64_t best_cost = totals_.cost();
  const Move *first = nullptr, *second = nullptr;
  for (size_t i = 0; i < moves_.size(); ++i) {
    for (size_t j = i + 1; j < moves_.size(); ++j) {
      if (moves_[i].group == moves_[j].group) continue;
      const int64_t cost =
          totals_.cost_with(moves_[i].group, moves_[i].option, moves_[j].group, moves_[j].option);
      if (cost >= best_cost) continue;
      best_cost = cost;
      first = &moves_[i];
      second = &moves_[j];
    }
  }
  if (first == nullptr) return false;
  totals_.set(first->group, first->option);
  totals_.set(second->group, second->option);
  return true;
}

}  // namespace bagualu
