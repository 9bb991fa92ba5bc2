#include "bagualu/provision/pool_solver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace bagualu {
namespace {

constexpr int64_t kMiB = 1 << 20;

int64_t cost_of(const PoolProblem& problem, const std::vector<int>& choice) {
  std::vector<int64_t> bytes(problem.microbatches.size()), ns(problem.microbatches.size());
  for (size_t g = 0; g < choice.size(); ++g) {
    bytes[problem.groups[g].microbatch] += problem.options[choice[g]].bytes;
    ns[problem.groups[g].microbatch] += problem.options[choice[g]].ns;
  }
  int64_t excess = -problem.budget_bytes, cost = 0;
  for (size_t m = 0; m < bytes.size(); ++m) {
    excess += std::max<int64_t>(0, bytes[m] - problem.microbatches[m].window_bytes);
    cost += std::max<int64_t>(0, ns[m] - problem.microbatches[m].bubble_ns);
  }
  const int64_t link = overflow_ns(problem, excess);
  return link >= PoolTotals::kInfeasible ? -1 : cost + link;
}

// -1 if no choice fits.
int64_t exhaustive(const PoolProblem& problem) {
  std::vector<int> choice;
  for (const PoolGroup& group : problem.groups) choice.push_back(group.first_option);
  int64_t best = -1;
  for (;;) {
    const int64_t cost = cost_of(problem, choice);
    if (cost >= 0 && (best < 0 || cost < best)) best = cost;
    size_t g = 0;
    for (; g < choice.size(); ++g) {
      if (++choice[g] < problem.groups[g].end_option) break;
      choice[g] = problem.groups[g].first_option;
    }
    if (g == choice.size()) return best;
  }
}

PoolProblem random_problem(std::mt19937& random) {
  const auto between = [&random](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  PoolProblem problem;
  const int microbatches = static_cast<int>(between(1, 3));
  const int64_t unit = between(0, 1) ? kMiB : 1;  // ties and round numbers, or anything
  int64_t all = 0;
  for (int m = 0; m < microbatches; ++m) {
    const int64_t groups = between(1, microbatches == 1 ? 8 : 3);
    int64_t of_microbatch = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const int first = static_cast<int>(problem.options.size());
      const int64_t full = between(0, 400) * (unit == 1 ? 977'123 : unit);
      problem.options.push_back({full, 0});
      for (int64_t extra = between(0, 3); extra > 0; --extra) {
        problem.options.push_back({full * between(0, 8) / 8, between(0, 40) * 50'000});
      }
      problem.groups.push_back({first, static_cast<int>(problem.options.size()), m});
      of_microbatch += full;
    }
    PoolMicrobatch limits;
    if (between(0, 1)) limits.window_bytes = of_microbatch * between(0, 6) / 8;
    if (between(0, 1)) limits.bubble_ns = between(0, 40) * 50'000;
    problem.microbatches.push_back(limits);
    all += of_microbatch;
  }
  problem.budget_bytes = all * between(0, 9) / 8;
  if (between(0, 1)) {
    problem.link_ns_per_byte = static_cast<double>(between(1, 100)) / 1000.0;
    problem.overflow_limit_bytes = all * between(0, 8) / 8;
  }
  return problem;
}

// Not more than the tolerance above the optimum, and the bound never above it.
void expect_optimal(const PoolProblem& problem, const PoolTolerance& tolerance, PoolSolver& solver,
                    int number) {
  PoolSolution solution;
  solver.solve(problem, tolerance, solution);
  const int64_t optimum = exhaustive(problem);
  ASSERT_EQ(solution.feasible, optimum >= 0) << number;
  if (!solution.feasible) {
    PoolProblem larger = problem;
    larger.budget_bytes += solution.missing_bytes - 1;
    EXPECT_LT(exhaustive(larger), 0) << number;
    larger.budget_bytes += 1;
    EXPECT_GE(exhaustive(larger), 0) << number;
    return;
  }
  EXPECT_EQ(solution.cost_ns, cost_of(problem, solution.choice)) << number;
  EXPECT_LE(solution.cost_ns, optimum + tolerance.gap_ns(optimum)) << number;
  EXPECT_LE(solution.bound_ns, optimum) << number;
}

TEST(PoolSolver, IsWithinTheToleranceOfTheExhaustiveOptimum) {
  std::mt19937 random(7);
  PoolSolver solver;
  for (int i = 0; i < 5000; ++i) expect_optimal(random_problem(random), {}, solver, i);
}

TEST(PoolSolver, WithoutToleranceEqualsTheExhaustiveOptimum) {
  std::mt19937 random(8);
  PoolSolver solver;
  for (int i = 0; i < 2000; ++i) {
    const PoolProblem problem = random_problem(random);
    expect_optimal(problem, PoolTolerance::exact(), solver, i);
  }
}

// Twelve layers, three independent items each: bytes saved for ns.
PoolProblem twelve_layers(int64_t need_mib) {
  PoolProblem problem;
  problem.microbatches.resize(1);
  const PoolOption items[] = {
      {120 * kMiB, 120'000}, {320 * kMiB, 1'600'000}, {240 * kMiB, 1'290'000}};
  for (int layer = 0; layer < 12; ++layer) {
    for (const PoolOption& item : items) {
      const int first = static_cast<int>(problem.options.size());
      problem.options.push_back({item.bytes, 0});
      problem.options.push_back({0, item.ns});
      problem.groups.push_back({first, first + 2, 0});
    }
  }
  problem.budget_bytes = (8160 - need_mib) * kMiB;
  return problem;
}

TEST(PoolSolver, MinimalCombinationOfTwelveLayers) {
  PoolSolver solver;
  PoolSolution solution;
  const std::pair<int64_t, int64_t> expected[] = {{0, 0},
                                                  {120, 120'000},
                                                  {1440, 1'440'000},
                                                  {1441, 2'610'000},
                                                  {2848, 8'820'000},
                                                  {6000, 24'510'000},
                                                  {8160, 36'120'000}};
  for (const auto& [need, ns] : expected) {
    solver.solve(twelve_layers(need), PoolTolerance::exact(), solution);
    EXPECT_TRUE(solution.feasible);
    EXPECT_EQ(solution.cost_ns, ns) << need;
    EXPECT_EQ(solution.bound_ns, ns) << need;
  }
  solver.solve(twelve_layers(8161), {}, solution);
  EXPECT_FALSE(solution.feasible);
  EXPECT_EQ(solution.missing_bytes, kMiB);
}

TEST(PoolSolver, CostNeverFallsWhenTheNeedGrows) {
  PoolSolver solver;
  PoolSolution solution;
  int64_t last = 0;
  for (int64_t need = 0; need <= 8160; need += 17) {
    solver.solve(twelve_layers(need), PoolTolerance::exact(), solution);
    ASSERT_TRUE(solution.feasible) << need;
    EXPECT_GE(solution.cost_ns, last) << need;
    last = solution.cost_ns;
  }
}

TEST(PoolSolver, SameProblemSameSolution) {
  std::mt19937 random(9);
  PoolSolver one, other;
  PoolSolution first, second;
  for (int i = 0; i < 300; ++i) {
    const PoolProblem problem = random_problem(random);
    one.solve(random_problem(random), {}, first);  // whatever was solved before
    one.solve(problem, {}, first);
    other.solve(problem, {}, second);
    EXPECT_EQ(first.choice, second.choice) << i;
    EXPECT_EQ(first.bound_ns, second.bound_ns) << i;
  }
}

// Bytes past the window cost the link's price, so no recompute that is dearer is ever chosen.
TEST(PoolSolver, PriceOfMemoryNeverExceedsTheLinks) {
  PoolProblem problem;
  problem.microbatches = {{.window_bytes = 50}};
  problem.options = {{100, 0}, {0, 5000}};
  problem.groups = {{0, 2, 0}};
  problem.link_ns_per_byte = 10;
  problem.overflow_limit_bytes = 1000;
  PoolSolver solver;
  PoolSolution solution;
  solver.solve(problem, {}, solution);
  EXPECT_TRUE(solution.feasible);
  EXPECT_EQ(solution.overflow_bytes, 50);
  EXPECT_EQ(solution.cost_ns, 500);
  problem.options[1].ns = 400;
  solver.solve(problem, PoolTolerance::exact(), solution);
  EXPECT_EQ(solution.cost_ns, 400);
}

}  // namespace
}  // namespace bagualu
