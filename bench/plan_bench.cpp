// How fast a training job is planned, on one core: a whole prediction (memory of every pipeline
// rank and iteration time) of DeepSeek-V3 on 1,024 GPUs, one layer's bytes at another load, and
// configurations of a search per second. Prints one JSON line per figure; medians.
#include <filesystem>
#include <string>

#include "bagualu/base/json.h"
#include "bagualu/base/units.h"
#include "bagualu/cost/system.h"
#include "bagualu/provision/job_search.h"
#include "bagualu/schedule/job_memory.h"
#include "bagualu/schedule/job_time.h"
#include "figures.h"

namespace bagualu {
namespace {

const std::filesystem::path kRoot = BAGUALU_SOURCE_DIR;

Job deepseek_1024() {
  Job job;
  job.model = model_from_file(kRoot / "configs/models/deepseek-v3.json");
  job.layout = parse_layout("pp=16,ep=64,dp=64", "bench", "layout");
  job.stages = default_stages(job.model, 16, 1);
  job.microbatches = 120;
  job.optimizer.distributed = true;
  validate(job, "bench");
  return job;
}

void whole_prediction(const Job& job, const SystemSpec& system) {
  int64_t sum = 0;
  const Spread time = measure(301, wall_ns, [&] {
    const JobMemory memory(job);
    for (int64_t rank = 0; rank < job.layout.pp; ++rank) {
      sum += memory.peak_bytes(rank, {.factor = 1.2});
    }
    sum += job_time(job, system, {.factor = 1.2}).iteration_ns;
  });
  print("plan_dsv3_1024", "ms", 1e3 * time.median,
        {{"least", 1e3 * time.least}, {"worst", 1e3 * time.worst}, {"stages", 16}, {"check", sum}});
}

void one_layer(const Job& job) {
  constexpr int kLoads = 100'000;
  const JobMemory memory(job);
  int64_t sum = 0;
  const Spread time = measure(21, wall_ns, [&] {
    for (int i = 0; i < kLoads; ++i) sum += memory.layer_bytes(30, 1.0 + i * 1e-5);
  });
  print("layer_bytes", "us", 1e6 * time.median / kLoads,
        {{"least", 1e6 * time.least / kLoads}, {"check", sum}});
}

void search(const Job& job, const SystemSpec& system) {
  SearchResult found;
  const Spread time = measure(
      5, wall_ns, [&] { found = search_jobs(job, system, {}, {.factor = 1.2}, 80 * kGiB); });
  const double rate = static_cast<double>(found.configurations) / time.median;
  print("search_rate", "configurations/s", rate,
        {{"configurations", found.configurations},
         {"fitting", found.fitting},
         {"ms", 1e3 * time.median}});
}

int main_of_bench() {
  const Job job = deepseek_1024();
  const SystemSpec system = system_from_file(kRoot / "configs/systems/h100.json");
  whole_prediction(job, system);
  one_layer(job);
  search(job, system);
  return 0;
}

}  // namespace
}  // namespace bagualu

// scripts/bench passes Google Benchmark's flags to every program; these figures need none.
int main() { return bagualu::main_of_bench(); }
