// The run log of `bagualu train` (docs/formats.md, Run log), as far as a replay needs it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/model/model_spec.h"
#include "bagualu/provision/training_rank.h"

namespace bagualu {

/// Bytes of a rank around a pass, or a pair of passes that ran as one; static ones included.
struct PassLevel {
  int64_t peak_bytes = 0;
  int64_t live_bytes = 0;  ///< at its end
  bool operator==(const PassLevel&) const = default;
};

/// Live bytes after one action.
struct LivePoint {
  int64_t live_bytes = 0;
  std::string action;
  bool operator==(const LivePoint&) const = default;
};

/// What one rank says of one step. Entries are by micro-batch, and by stage of the rank within it.
struct LoggedRank {
  int64_t peak_bytes = 0;
  int64_t host_peak_bytes = 0;
  int64_t end_bytes = 0;
  std::vector<std::vector<LayerLoad>> loads;  ///< by entry, by gate of its stage
  std::vector<std::string> plans;             ///< by entry, plan_letters()
  std::vector<PassLevel> passes;              ///< in the order in which they ran
  std::vector<int64_t> decision_ns;
  int64_t cache_hits = 0;
  int64_t passes_ns = 0;  ///< from the step's begin to the end of its last pass
  int64_t step_ns = 0;    ///< to the end of the optimizer
};

struct LoggedStep {
  int64_t step = 0;
  int64_t step_ns = 0;  ///< of rank 0, all that stands between two steps included
  bool repeated = false;
  bool spike = false;
  std::vector<LoggedRank> ranks;
  int memory_rank = -1;  ///< of `memory`; -1: none
  std::vector<LivePoint> memory;
};

/// From one start of the program to its end.
struct LoggedStart {
  int64_t first_step = 0;           ///< its steps follow one another from here
  TrainingSetup setup;              ///< of rank 0
  std::vector<int64_t> live_bytes;  ///< by rank, before the first step
  AttentionScratch scratch;
  std::vector<Json> profiles;   ///< operator times
  std::vector<int> profile_of;  ///< by rank
  std::vector<LoggedStep> steps;
};

struct LoggedRun {
  ModelSpec model;
  std::vector<LoggedStart> starts;
};

/// A torn last line and unknown types are skipped.
/// Throws: InvalidInput naming file, line and key; for what is no run log, for a log without a start
///         or without steps, for one that an older version wrote, for steps that do not have every
///         rank, and for steps that do not follow one another: policies remember.
LoggedRun read_run_log(const std::filesystem::path& path);

}  // namespace bagualu
