// A real run against its simulation: the same decisions, the same bytes, about the same time.
//
// Bytes and decisions follow from the log's loads alone and have to be equal. Times: operators and
// exchanges from the profile that the run had; what no operator is (decisions, gradients summed,
// optimizer, the loop around steps) from the run's own first steps, which are then left out.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bagualu/sim/run_log.h"

namespace bagualu {

/// Places where something was expected to be equal, and those where it is not.
struct EqualCount {
  int64_t compared = 0;
  int64_t different = 0;
  std::string first;  ///< of the different ones: "rank 1, micro-batch 2: 48128 for 48064"

  void add(const EqualCount& other);
};

struct StepValidation {
  int64_t step = 0;
  bool spike = false;
  EqualCount residencies;  ///< units of all ranks and micro-batches, pinned ones too
  EqualCount plans;        ///< residencies and what else a plan says
  EqualCount peaks;        ///< of ranks, device
  EqualCount passes;       ///< peak and live bytes of every pass of every rank
  EqualCount points;       ///< live bytes after every action, of the logged rank
  EqualCount host_peaks;
  EqualCount ends;        ///< live bytes when the step ended
  EqualCount cache_hits;  ///< decisions without a search, by rank
  int64_t measured_ns = 0;
  int64_t predicted_ns = 0;        ///< 0: of no use, or not asked for
  int64_t measured_passes_ns = 0;  ///< of rank 0, until its last pass
  int64_t predicted_passes_ns = 0;
  bool calibrates = false;  ///< what is outside operators was taken from it

  double error() const {  ///< relative, positive if predicted too long
    return static_cast<double>(predicted_ns - measured_ns) / static_cast<double>(measured_ns);
  }
};

/// From the calibrating steps of a start.
struct OutsideTimes {
  int64_t decisions_ns = 0;  ///< per step, of the rank that decides longest
  int64_t after_ns = 0;      ///< per step, from rank 0's last pass to its next step: median
};

struct RunValidation {
  std::vector<StepValidation> steps;
  OutsideTimes outside;
  StepValidation total;  ///< sums of counts
  /// Of the steps that neither calibrate nor begin a start. Nearest rank.
  int64_t timed_steps = 0;
  double median_error = 0;  ///< of |error|
  double p90_error = 0;
  double bias = 0;  ///< median of error
  /// The same of the passes alone: nothing of it was calibrated.
  double median_passes_error = 0;
};

struct ValidateOptions {
  bool times = true;
  int64_t calibrating_steps = 3;  ///< after the first of a start, which warms caches
  std::function<void(int64_t done, int64_t steps)> progress;
};

/// Throws: as RunReplay.
RunValidation validate_run(const LoggedRun& run, const std::string& where,
                           const ValidateOptions& options);

}  // namespace bagualu
