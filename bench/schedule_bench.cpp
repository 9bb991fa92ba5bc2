// Dual-batch schedules on the instance families of bagualu/schedule/dual_batch_families.h: how long
// a decision takes on one core, how good it is, what a hand-made order would give. Prints one JSON
// line per figure. Communication is pinned, as in the product; "free" is the solver's own choice.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/base/json.h"
#include "bagualu/schedule/dual_batch_families.h"
#include "bagualu/schedule/dual_batch_greedy.h"
#include "bagualu/schedule/dual_batch_solver.h"
#include "bagualu/schedule/verify_schedule.h"

namespace bagualu {
namespace {

constexpr int kRepeats = 3;  // the fastest counts, so that an interrupt does not

// Of this thread: other work on the machine is not the solver's time.
int64_t cpu_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

double us(int64_t ns) { return static_cast<double>(ns) / 1e3; }

/// Nearest rank. Requires: not empty.
int64_t quantile(std::vector<int64_t> values, double fraction) {
  BGL_CHECK(!values.empty());
  const auto at = std::min(values.size() - 1,
                           static_cast<size_t>(fraction * static_cast<double>(values.size())));
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(at), values.end());
  return values[at];
}

void print(const std::string& figure, const char* unit, double value, const Json& more) {
  Json line = {{"figure", figure}, {"unit", unit}, {"value", value}, {"kind", "measured"}};
  line.update(more);
  std::puts(line.dump().c_str());
}

/// Sums over the instances of one family, makespans over the solver's.
struct Row {
  int64_t instances = 0;
  double no_overlap = 0, fixed = 0, greedy = 0, gap = 0;
  double fixed_max = 0, greedy_max = 0, gap_max = 0;
  int64_t worse = 0;  ///< than the fixed or the greedy order
  std::vector<int64_t> solve_ns;
};

void add(const DualBatchInstance& instance, DualBatchSolver& solver, Row& row) {
  DualBatchSchedule schedule;
  int64_t fastest = INT64_MAX;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const int64_t begin = cpu_ns();
    schedule = solver.solve(instance, {});
    fastest = std::min(fastest, cpu_ns() - begin);
  }
  const auto violations = verify_schedule(instance, schedule);
  BGL_CHECK(violations.empty(), violations.front());
  const auto over = [&](int64_t ns) {
    return static_cast<double>(ns) / static_cast<double>(schedule.makespan_ns);
  };
  const double fixed = over(replay(instance, fixed_order(instance)).makespan_ns);
  const double greedy = over(replay(instance, greedy_order(instance)).makespan_ns);
  ++row.instances;
  row.no_overlap += over(no_overlap_ns(instance));
  row.fixed += fixed;
  row.greedy += greedy;
  row.gap += schedule.gap_fraction();
  row.fixed_max = std::max(row.fixed_max, fixed);
  row.greedy_max = std::max(row.greedy_max, greedy);
  row.gap_max = std::max(row.gap_max, schedule.gap_fraction());
  row.worse += std::min(fixed, greedy) < 1.0;
  row.solve_ns.push_back(fastest);
}

Row run(const Family& family, bool pinned, int64_t instances) {
  std::mt19937_64 random(1);
  DualBatchSolver solver;
  Row row;
  for (int64_t i = 0; i < instances; ++i) add(family_instance(family, pinned, random), solver, row);
  return row;
}

double rounded(double value) {
  return static_cast<double>(static_cast<int64_t>(value * 1e5)) / 1e5;
}

void print_row(const Family& family, const Row& row, const Row& free) {
  const auto mean = [&row](double sum) {
    return rounded(sum / static_cast<double>(row.instances));
  };
  std::string name = "schedule_family " + family_name(family);
  std::replace(name.begin(), name.end(), ' ', '_');
  print(name, "x", mean(row.no_overlap),
        {{"of", "makespan without overlap over ours, mean"},
         {"instances", row.instances},
         {"fixed", mean(row.fixed)},
         {"fixed_max", rounded(row.fixed_max)},
         {"greedy", mean(row.greedy)},
         {"greedy_max", rounded(row.greedy_max)},
         {"worse_than_either", row.worse + free.worse},
         {"gap_mean", mean(row.gap)},
         {"gap_max", rounded(row.gap_max)},
         {"p50_us", us(quantile(row.solve_ns, 0.5))},
         {"p95_us", us(quantile(row.solve_ns, 0.95))},
         {"free_p50_us", us(quantile(free.solve_ns, 0.5))},
         {"free_p95_us", us(quantile(free.solve_ns, 0.95))}});
}

struct Total {
  std::vector<int64_t> ns;
  double gap = 0, gap_max = 0;
  int64_t instances = 0;

  void add(const Row& row) {
    ns.insert(ns.end(), row.solve_ns.begin(), row.solve_ns.end());
    gap += row.gap;
    gap_max = std::max(gap_max, row.gap_max);
    instances += row.instances;
  }
  double gap_mean() const { return gap / static_cast<double>(instances); }
};

void bench(bool quick) {
  const int64_t instances = quick ? 60 : 600;
  Total four, eight, free_four, free_eight;
  for (const Family& family : all_families()) {
    const Row row = run(family, true, instances), free = run(family, false, instances);
    print_row(family, row, free);
    (family.layers == 4 ? four : eight).add(row);
    (family.layers == 4 ? free_four : free_eight).add(free);
  }
  const auto line = [&](const char* figure, double fraction) {
    print(figure, "us", us(quantile(four.ns, fraction)),
          {{"layers", 4},
           {"instances", four.instances},
           {"clock", "CPU time of the thread, fastest of 3"},
           {"free", us(quantile(free_four.ns, fraction))},
           {"eight_layers", us(quantile(eight.ns, fraction))},
           {"eight_layers_free", us(quantile(free_eight.ns, fraction))}});
  };
  line("schedule_p50", 0.5);
  line("schedule_p99", 0.99);
  line("schedule_max", 1.0);
  Total all;
  for (const Total* part : {&four, &eight}) {
    all.gap += part->gap;
    all.instances += part->instances;
  }
  print("schedule_gap_mean", "ratio", all.gap_mean(),
        {{"of", "(makespan - bound) / bound"},
         {"instances", all.instances},
         {"gap_max", std::max(four.gap_max, eight.gap_max)},
         {"free", (free_four.gap + free_eight.gap) / static_cast<double>(all.instances)},
         {"free_gap_max", std::max(free_four.gap_max, free_eight.gap_max)}});
}

}  // namespace
}  // namespace bagualu

int main(int argc, char** argv) {
  bool quick = true;  // scripts/bench: half a second and more is the full set
  for (int i = 1; i < argc; ++i) {
    constexpr const char* kMinTime = "--benchmark_min_time=";
    if (std::strncmp(argv[i], kMinTime, std::strlen(kMinTime)) == 0) {
      quick = std::atof(argv[i] + std::strlen(kMinTime)) < 0.5;
    } else {
      std::fprintf(stderr, "usage: schedule_bench [--benchmark_min_time=SECONDS]\n");
      return 2;
    }
  }
  bagualu::bench(quick);
  return 0;
}
