// Speed of whole simulations, decisions included: an iteration of 12,288 cards, operator by
// operator, and 1,000 iterations of 128 cards.
#include <sys/resource.h>

#include <filesystem>
#include <string>

#include "bagualu/sim/job_sim.h"
#include "bagualu/sim/scenario.h"
#include "figures.h"

namespace bagualu {
namespace {

const std::filesystem::path kConfigs = std::filesystem::path(BAGUALU_SOURCE_DIR) / "configs";

Scenario scenario(const std::string& name) {
  return scenario_from_file(kConfigs / "scenarios" / (name + ".json"), {kConfigs});
}

const SimPolicy& adaptive(const Scenario& scenario) {
  for (const SimPolicy& policy : scenario.policies) {
    if (policy.policy == "adaptive") return policy;
  }
  throw InternalError("no adaptive policy in " + scenario.name);
}

struct Timed {
  SimRun run;
  int64_t first_ns = 0;   ///< until the first iteration is over: graphs and policies made
  int64_t others_ns = 0;  ///< of the iterations behind it
  int64_t others = 0;
};

Timed simulate(const std::string& name, int64_t iterations) {
  const Scenario job = scenario(name);
  Timed timed;
  SimOptions options;
  options.iterations = iterations;
  const int64_t begin = process_cpu_ns();
  int64_t first = 0;
  options.progress = [&](int64_t, int64_t) {
    if (first == 0) first = process_cpu_ns();
    return true;
  };
  timed.run = simulate_job(job, adaptive(job), options);
  BGL_CHECK(timed.run.short_by_bytes == 0 && timed.run.iterations == iterations, name,
            timed.run.short_by_bytes, timed.run.iterations);
  timed.first_ns = first - begin;
  timed.others_ns = process_cpu_ns() - first;
  timed.others = iterations - 1;
  return timed;
}

int64_t most_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

double seconds(int64_t ns) { return static_cast<double>(ns) * 1e-9; }

Json described(const Timed& timed) {
  return {{"first_iteration_s", seconds(timed.first_ns)},
          {"events", timed.run.events},
          {"ooms", timed.run.ooms},
          {"clock", "CPU time of the process; one thread at a time"},
          {"resident_bytes", most_resident_bytes()},
          {"rival", "SimuMax simulate(), one step of one configuration, same machine"},
          {"rival_s", 5.7}};
}

void bench(bool quick) {
  const Timed large = simulate("bw1000-12288", quick ? 4 : 33);
  print("sim_12288_iteration", "s", seconds(large.others_ns) / static_cast<double>(large.others),
        described(large));
  const int64_t iterations = quick ? 300 : 1000;
  const Timed small = simulate("bw1000-128", iterations);
  const double all =
      seconds(small.first_ns) + seconds(small.others_ns) / static_cast<double>(small.others) * 999;
  Json more = described(small);
  more["iterations_run"] = iterations;
  print("sim_128_1000_iterations", "s", all, more);
}

}  // namespace
}  // namespace bagualu

int main(int argc, char** argv) {
  bagualu::bench(bagualu::is_quick(argc, argv, "sim_bench"));
  return 0;
}
