// Predicted against measured peak memory of published runs: every row, its error, and the mean.
//
// Usage: plan_validation FILE...   (bagualu.measured_jobs; see docs/formats.md)
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <string>

#include "bagualu/cost/measured_jobs.h"
#include "bagualu/schedule/job_memory.h"

namespace bagualu {
namespace {

constexpr double kMiB = 1 << 20;

/// Largest of the ranks of one pipeline stage; ranks of a stage stand next to each other.
int64_t measured_peak(const MeasuredJob& row, int64_t pp_rank) {
  if (row.peak_bytes.size() <= 1) return row.peak_bytes.empty() ? 0 : row.peak_bytes.front();
  const int64_t of_stage = row.job.layout.world_size / row.job.layout.pp;
  const auto begin = row.peak_bytes.begin() + pp_rank * of_stage;
  return *std::max_element(begin, begin + of_stage);
}

void print_file(const std::string& path, bool causes) {
  double sum = 0;
  double worst = 0;
  int rows = 0;
  for (const MeasuredJob& row : measured_jobs_from_file(path).rows) {
    if (row.peak_bytes.empty() && !row.out_of_memory) continue;
    const JobMemory memory(row.job);
    int64_t most = 0;
    int64_t needed = 0;
    int64_t most_measured = 0;
    for (int64_t rank = 0; rank < row.job.layout.pp; ++rank) {
      const RankMemory told = memory.describe(rank, {});
      const int64_t measured = measured_peak(row, rank);
      most = std::max(most, told.peak_bytes);
      needed = std::max(needed, told.reserved_bytes + told.communication_bytes);
      most_measured = std::max(most_measured, measured);
      if (row.peak_bytes.size() <= 1 && !causes) continue;
      fmt::print(
          "{:58} rank {}  static {:9.1f}  peak {:9.1f}  measured {:9.1f} MiB  {:+.3f} %  {} {}\n",
          row.id, rank, told.static_bytes / kMiB, told.peak_bytes / kMiB, measured / kMiB,
          100.0 * (static_cast<double>(told.peak_bytes) / measured - 1), pass_text(told.cause.pass),
          told.cause.op);
      if (!causes) continue;
      for (const KindBytes& kind : told.by_kind) {
        fmt::print("      {:32} {:10.1f}\n", kind.kind, kind.bytes / kMiB);
      }
      for (const TensorRow& tensor : told.largest) {
        fmt::print("      {:32} {:10.1f} x{} {} ({})\n", tensor.name, tensor.bytes / kMiB,
                   tensor.count, tensor.saved ? "saved" : "transient", tensor.op);
      }
    }
    if (row.out_of_memory) {
      fmt::print("{:58} out of memory, predicted {:.1f}, device {:.1f} of {:.1f} MiB\n", row.id,
                 most / kMiB, needed / kMiB, row.device_bytes / kMiB);
      continue;
    }
    const double error = 100.0 * (static_cast<double>(most) / most_measured - 1);
    if (row.peak_bytes.size() <= 1) {
      fmt::print(
          "{:58} predicted {:.1f}, measured {:.1f} MiB, {:+.3f} %, device {:.1f} of {:.1f}\n",
          row.id, most / kMiB, most_measured / kMiB, error, needed / kMiB, row.device_bytes / kMiB);
    }
    sum += std::fabs(error);
    worst = std::max(worst, std::fabs(error));
    ++rows;
  }
  if (rows > 0) {
    fmt::print("{}: {} rows, mean absolute error {:.3f} %, worst {:.3f} %\n", path, rows,
               sum / rows, worst);
  }
}

}  // namespace
}  // namespace bagualu

int main(int argc, char** argv) {
  try {
    bool causes = false;
    for (int i = 1; i < argc; ++i) {
      if (std::string(argv[i]) == "--causes") {
        causes = true;
      } else {
        bagualu::print_file(argv[i], causes);
      }
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 2;
  }
  return 0;
}
