#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/model/job.h"

namespace bagualu {

/// A job and what was measured of it.
struct MeasuredJob {
  std::string id;
  std::string group;  ///< rows of one group are fitted on, or tested on, together
  Job job;
  double iteration_ns = 0;  ///< 0: not measured
  /// One layer of the model's first kind, one micro-batch; 0: not measured.
  double layer_forward_ns = 0;
  double layer_backward_ns = 0;     ///< with what is recomputed
  double peer_iteration_ns = 0;     ///< what another predictor says; 0: nothing
  /// By rank of the job, or one: the largest of all ranks; empty: not measured.
  std::vector<int64_t> peak_bytes;
  int64_t device_bytes = 0;  ///< of a device; 0: not stated
  bool out_of_memory = false;
};

struct MeasuredJobs {
  std::string source;
  std::vector<MeasuredJob> rows;  ///< in the file's order
};

/// Reads "bagualu.measured_jobs" (docs/formats.md).
/// Throws: InvalidInput naming row and key.
MeasuredJobs measured_jobs_from_json(const Json& object, const std::string& where);
MeasuredJobs measured_jobs_from_file(const std::filesystem::path& path);

}  // namespace bagualu
