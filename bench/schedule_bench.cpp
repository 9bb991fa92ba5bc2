// Dual-batch schedules on the instance families of bagualu/schedule/dual_batch_families.h: how long
// a decision takes on one core, how good it is, what a hand-made order would give. Prints one JSON
// line per figure. Communication is pinned, as in the product; "free" is the solver's own choice.
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/base/json.h"
#include "bagualu/schedule/dual_batch_cache.h"
#include "bagualu/schedule/dual_batch_families.h"
#include "bagualu/schedule/dual_batch_greedy.h"
#include "bagualu/schedule/dual_batch_solver.h"
#include "bagualu/schedule/verify_schedule.h"
#include "figures.h"

namespace bagualu {
namespace {

constexpr int kRepeats = 3;  // the fastest counts, so that an interrupt does not

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

// --- the cache ---

/// A later micro-batch: the rows of each layer, forward and backward, up to 4 % more or fewer.
DualBatchInstance moved(DualBatchInstance instance, std::mt19937_64& random) {
  const auto scale = [](int64_t ns, int64_t per_mille) { return ns + ns / 1000 * per_mille; };
  const int layers = static_cast<int>(instance.forward.size()) / 4;
  for (int layer = 0; layer < layers; ++layer) {
    const auto factor = [&random] { return static_cast<int64_t>(random() % 81) - 40; };
    const int64_t forward = factor(), backward = factor();
    for (int op = 1; op <= 3; ++op) {
      int64_t& ns = instance.forward[static_cast<size_t>(4 * layer + op)].ns;
      ns = scale(ns, forward);
    }
    for (int op = 0; op <= 2; ++op) {
      int64_t& ns = instance.backward[static_cast<size_t>(4 * layer + op)].ns;
      ns = scale(ns, backward);
    }
    for (WeightGradFiller& grad : instance.weight_grads) {
      if (grad.after_backward == 4 * layer + 1) grad.ns = scale(grad.ns, backward);
    }
  }
  return instance;
}

struct Cached {
  std::vector<int64_t> same_ns, moved_ns;  ///< hits on equal durations, on moved ones
  double gap = 0;                          ///< of the moved ones
  int64_t moved_count = 0;
};

/// Each instance put into the cache once, then asked for again, and with moved durations.
void run_cached(const Family& family, int64_t instances, Cached& cached) {
  std::mt19937_64 random(2);
  for (int64_t i = 0; i < instances; ++i) {
    ScheduleCache cache;
    const DualBatchInstance first = family_instance(family, true, random);
    cache.solve(first);
    int64_t fastest = INT64_MAX;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      const int64_t begin = cpu_ns();
      const DualBatchSchedule schedule = cache.solve(first);
      fastest = std::min(fastest, cpu_ns() - begin);
      BGL_CHECK(schedule.source == ScheduleSource::kCache, family_name(family));
    }
    cached.same_ns.push_back(fastest);
    const DualBatchInstance later = moved(first, random);
    const int64_t begin = cpu_ns();
    const DualBatchSchedule schedule = cache.solve(later);
    const int64_t ns = cpu_ns() - begin;
    const auto violations = verify_schedule(later, schedule);
    BGL_CHECK(violations.empty(), violations.front());
    ++cached.moved_count;
    if (schedule.source != ScheduleSource::kCache) continue;
    cached.moved_ns.push_back(ns);
    cached.gap += schedule.gap_fraction();
  }
}

void bench_cache(int64_t instances) {
  Cached cached;
  for (const Family& family : all_families()) {
    if (family.layers == 4) run_cached(family, instances, cached);
  }
  const auto hits = static_cast<double>(cached.moved_ns.size());
  Json more = {{"layers", 4},
               {"instances", cached.same_ns.size()},
               {"clock", "CPU time of the thread, fastest of 3"},
               {"p99", us(quantile(cached.same_ns, 0.99))},
               {"moved_hit_share", hits / static_cast<double>(cached.moved_count)}};
  if (!cached.moved_ns.empty()) {
    more.update({{"moved_p50", us(quantile(cached.moved_ns, 0.5))},
                 {"moved_p99", us(quantile(cached.moved_ns, 0.99))},
                 {"moved_gap_mean", cached.gap / hits}});
  }
  print("schedule_cached_p50", "us", us(quantile(cached.same_ns, 0.5)), more);
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
  bench_cache(instances);
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
  bagualu::bench(bagualu::is_quick(argc, argv, "schedule_bench"));
  return 0;
}
