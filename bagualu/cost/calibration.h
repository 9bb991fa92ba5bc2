// Fits a machine's efficiencies to measured jobs. Few numbers, found by a search that is the same
// on every machine; errors are reported with and without them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cost/measured_jobs.h"
#include "bagualu/cost/system.h"

namespace bagualu {

/// One measured time of a row and its prediction.
struct TimeComparison {
  std::string row;
  std::string group;
  std::string what;  ///< "iteration", "layer forward", "layer backward"
  double measured_ns = 0;
  double predicted_ns = 0;
  double unfitted_ns = 0;  ///< from the system as it was given
  double peer_ns = 0;      ///< what another predictor says; 0: nothing
  bool fitted_on = false;  ///< the fit has seen it
  double error_fraction() const { return predicted_ns / measured_ns - 1; }
  double unfitted_error_fraction() const { return unfitted_ns / measured_ns - 1; }
};

struct ErrorSummary {
  int64_t count = 0;
  double mean_fraction = 0;  ///< of the errors' magnitudes
  double largest_fraction = 0;
};

struct FittedNumber {
  std::string key;  ///< of the system file
  double before = 0;
  double after = 0;
};

struct Calibration {
  Json system;  ///< provenance "fitted", with "fit": numbers, rows, errors
  std::vector<FittedNumber> numbers;
  std::vector<TimeComparison> comparisons;  ///< all rows, in the file's order

  /// Of the rows that the fit has seen, or of the others.
  ErrorSummary summary(bool fitted_on) const;
  ErrorSummary unfitted_summary(bool fitted_on) const;
  ErrorSummary peer_summary(bool fitted_on) const;
};

/// Iteration time of a job on a machine, in nanoseconds (schedule/job_time.h, which this room does
/// not see).
using IterationPredictor = std::function<double(const Job&, const SystemSpec&)>;

struct CalibrationOptions {
  /// Keys of the system file to fit: efficiencies in (0, 1], latencies and overheads in ns. Empty:
  /// the efficiencies of GEMMs, of memory traffic and of collectives, in this order, as many as
  /// there are three rows each for.
  std::vector<std::string> numbers;
  /// Groups are sorted by name and every second one, from the first on, is fitted on; false: all.
  bool hold_out = true;
};

/// Minimises the squares of log(predicted / measured) over the rows fitted on.
/// Throws: InvalidInput if a number is no key that can be fitted, or if there are fewer than three
///         rows per number.
/// Cost:   some thousand predictions of each row.
Calibration calibrate(const Json& system, const std::string& where, const MeasuredJobs& jobs,
                      const IterationPredictor& predictor, const CalibrationOptions& options);

}  // namespace bagualu
