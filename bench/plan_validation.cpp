// Predicted against measured peak memory of published runs: every row, its error, and the mean.
//
// Usage: plan_validation [--causes] FILE...
//   bagualu.measured_jobs: peaks; bagualu.megatron_ci_memory: peak less static bytes of MoE jobs.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <string>

#include "bagualu/base/json.h"
#include "bagualu/cost/measured_jobs.h"
#include "bagualu/model/megatron_args.h"
#include "bagualu/schedule/job_memory.h"

namespace bagualu {
namespace {

constexpr double kMiB = 1 << 20;
constexpr double kWidest = 1.12;  ///< end of an interval of functional tests over its begin

/// Largest of the ranks of one pipeline stage; ranks of a stage stand next to each other.
int64_t measured_peak(const MeasuredJob& row, int64_t pp_rank) {
  if (row.peak_bytes.size() <= 1) return row.peak_bytes.empty() ? 0 : row.peak_bytes.front();
  const int64_t of_stage = row.job.layout.world_size / row.job.layout.pp;
  const auto begin = row.peak_bytes.begin() + pp_rank * of_stage;
  return *std::max_element(begin, begin + of_stage);
}

/// Why a row of Megatron's functional tests is not computed; empty if it is.
std::string left_out(const Json& row) {
  if (!row["moe"].get<bool>()) return "no experts";
  if (!row["world_size"].is_number()) return "unknown number of GPUs";
  if (!row["vocab"].is_number() && !row["args"].contains("--vocab-size"))
    return "unknown vocabulary";
  for (const auto& [flag, value] : row["args"].items()) {
    if (flag.find("fsdp") != std::string::npos) return "FSDP";
    if (flag.find("mamba") != std::string::npos || flag.find("hybrid") != std::string::npos) {
      return "state-space layers";
    }
    if (flag.find("cuda-graph") != std::string::npos) return "CUDA graphs";
  }
  return "";
}

/// What a job needs beside its static bytes on the last rank, from a balanced router to one that
/// sends that rank `most` times as much.
void print_ci_row(const Json& row, double most, bool causes) {
  const auto id = row["id"].get<std::string>();
  MegatronOptions options;
  options.world_size = row["world_size"].get<int64_t>();
  if (row["vocab"].is_number()) options.vocab = row["vocab"].get<int64_t>();
  try {
    const Job job = megatron_job_from_json(row["args"], id, options).job;
    const JobMemory memory(job);
    const int64_t rank = job.layout.pp - 1;
    const RankMemory told = memory.describe(rank, {});
    const int64_t low = told.peak_bytes - told.static_bytes;
    const int64_t high = std::min(memory.peak_bytes(rank, {.factor = most}) - told.static_bytes,
                                  static_cast<int64_t>(kWidest * static_cast<double>(low)));
    const int64_t measured = row["peak_bytes"].get<int64_t>() - row["static_bytes"].get<int64_t>();
    fmt::print(
        "{:100} static {:8.1f} measured {:8.1f} | {:8.1f} to {:8.1f} ({:.1f} % wide), measured "
        "{:8.1f} {} {:+.1f} % {} {}\n",
        id, told.static_bytes / kMiB, row["static_bytes"].get<int64_t>() / kMiB, low / kMiB,
        high / kMiB, 100.0 * (static_cast<double>(high) / low - 1), measured / kMiB,
        measured >= low && measured <= high ? "inside" : "OUTSIDE",
        100.0 * (static_cast<double>(low) / measured - 1), pass_text(told.cause.pass),
        told.cause.op);
    if (!causes) return;
    for (const TensorRow& tensor : told.largest) {
      fmt::print("      {:32} {:10.1f} x{} {} ({})\n", tensor.name, tensor.bytes / kMiB,
                 tensor.count, tensor.saved ? "saved" : "transient", tensor.op);
    }
  } catch (const std::exception& error) {
    fmt::print("{:100} not computed: {}\n", id, error.what());
  }
}

void print_ci(const Json& file, bool causes) {
  constexpr double kMostLoad = 1.5;
  for (const Json& row : file["rows"]) {
    const std::string reason = left_out(row);
    if (reason.empty()) {
      print_ci_row(row, kMostLoad, causes);
    } else if (reason != "no experts") {
      fmt::print("{:100} left out: {}\n", row["id"].get<std::string>(), reason);
    }
  }
}

void print_file(const std::string& path, bool causes) {
  const Json file = read_json_file(path);
  if (file.value("format", "") == "bagualu.megatron_ci_memory") {
    print_ci(file, causes);
    return;
  }
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
