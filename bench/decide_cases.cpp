// Writes cases of the stage problem with the planner's answers, one JSON line each, for solvers
// that share no code with it (bench/stage_milp.py, bench/decide_rivals_bench.py).
#include <CLI/CLI.hpp>
#include <cstdio>
#include <ctime>
#include <random>
#include <string>

#include "stage_cases.h"

namespace {

// Of this thread: the solver is one thread, and other work on the machine is not its time.
int64_t cpu_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace bagualu;
  uint64_t seed = 1;
  int64_t count = 10;
  std::string family = "realistic", effort = "full";
  CLI::App app("Cases of the stage problem with the planner's answers, as JSON lines");
  app.add_option("--seed", seed, "Of the random numbers");
  app.add_option("--count", count, "Cases")->check(CLI::Range(1, 1'000'000));
  app.add_option("--family", family, "Which cases")->check(CLI::IsMember({"realistic", "items64"}));
  app.add_option("--effort", effort, "Of the planner: full, or what a gate may wait for")
      ->check(CLI::IsMember({"full", "gate"}));
  CLI11_PARSE(app, argc, argv);
  std::mt19937_64 random(seed);
  for (int64_t i = 0; i < count; ++i) {
    const auto stage = family == "items64"
                           ? items64_case(random)
                           : realistic_case(BAGUALU_SOURCE_DIR "/configs", {}, random);
    StagePlanner planner(stage->graph, stage->cost, stage->allow_quantise);
    if (effort == "gate") planner.set_tolerance(PoolTolerance::at_gate());
    StagePlan plan;
    planner.plan(stage->problem, plan);  // warm: scratch is there
    const int64_t begin = cpu_ns();
    planner.plan(stage->problem, plan);
    const int64_t solve_ns = cpu_ns() - begin;
    std::puts(stage_case_json(i, *stage, plan, solve_ns).dump().c_str());
  }
  return 0;
}
