// Writes dual-batch instances with the solver's exact answers, one JSON line each, for solvers that
// share no code with it (bench/dual_batch_milp.py).
#include <CLI/CLI.hpp>
#include <cstdio>
#include <random>

#include "bagualu/base/json.h"
#include "bagualu/schedule/dual_batch_families.h"

int main(int argc, char** argv) {
  using namespace bagualu;
  int64_t first = 0, count = 50;
  CLI::App app("Dual-batch instances with the solver's answers, as JSON lines");
  app.add_option("--first", first, "Number of the first instance")->check(CLI::Range(0, 1'000'000));
  app.add_option("--count", count, "Instances")->check(CLI::Range(1, 1'000'000));
  CLI11_PARSE(app, argc, argv);
  for (int64_t number = first; number < first + count; ++number) {
    const DualBatchInstance instance = milp_instance(number);
    SolveOptions options;
    options.tolerance_ppm = 0;
    const DualBatchSchedule schedule = solve(instance, options);
    Json order = Json::array();
    for (const ScheduleItem& item : schedule.order) {
      order.push_back({static_cast<int>(item.kind), item.index});
    }
    Json line = {{"case", number},
                 {"makespan_ns", schedule.makespan_ns},
                 {"bound_ns", schedule.bound_ns},
                 {"order", order}};
    line.update(instance_json(instance));
    std::puts(line.dump().c_str());
  }
  return 0;
}
