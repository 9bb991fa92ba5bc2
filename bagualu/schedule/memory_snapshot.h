#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/schedule/job_memory.h"

namespace bagualu {

/// What was measured of one rank's device memory; only what the snapshot says.
/// Buckets: "parameters", "gradients", "optimizer", "static" (all that lives between two steps),
/// "activations" (the peak above that), "peak" (allocated), "reserved".
struct RankSnapshot {
  int64_t rank = 0;
  std::map<std::string, int64_t> bucket_bytes;
};

/// Reads one of (docs/formats.md, "Memory snapshot"):
///  - "bagualu.memory_snapshot": ranks with *_bytes by bucket;
///  - torch.cuda.memory_stats(), of one rank or as {"RANK": stats};
///  - torch.cuda.memory._snapshot() of one rank, taken between two steps: live blocks are static,
///    the peak comes from its history of allocations where it has one.
/// Throws: InvalidInput naming what is missing.
std::vector<RankSnapshot> memory_snapshot_from_json(const Json& object, const std::string& where);
std::vector<RankSnapshot> memory_snapshot_from_file(const std::filesystem::path& path);

/// A bucket of a rank, measured and predicted.
struct BucketComparison {
  int64_t rank = 0;
  int64_t pp_rank = 0;
  std::string bucket;
  int64_t measured_bytes = 0;
  int64_t predicted_bytes = 0;
  double error_fraction() const {
    return static_cast<double>(predicted_bytes) / static_cast<double>(measured_bytes) - 1;
  }
};

/// Every measured bucket beside the prediction, in the order of RankSnapshot's list.
/// Requires: the job passed validate().
/// Throws:   InvalidInput(where) for a rank that the job does not have.
std::vector<BucketComparison> compare_memory(const std::vector<RankSnapshot>& snapshot,
                                             const Job& job, const RoutedLoads& loads,
                                             const std::string& where);

}  // namespace bagualu
