#include "bagualu/cost/calibration.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "bagualu/base/error.h"
#include "bagualu/cost/fit_range.h"
#include "bagualu/cost/job_cost.h"

namespace bagualu {
namespace {

constexpr int64_t kRowsPerNumber = 3;
constexpr const char* kDefaultNumbers[] = {"gemm_efficiency_fraction", "memory_efficiency_fraction",
                                           "collective_efficiency_fraction"};

std::set<std::string> groups_fitted_on(const MeasuredJobs& jobs, bool hold_out) {
  std::set<std::string> groups;
  for (const MeasuredJob& row : jobs.rows) groups.insert(row.group);
  if (!hold_out) return groups;
  std::set<std::string> chosen;
  bool take = true;
  for (const std::string& group : groups) {
    if (take) chosen.insert(group);
    take = !take;
  }
  return chosen;
}

/// The search: each coordinate in turn by golden section within a bracket that shrinks, which
/// needs no derivatives and takes the same steps everywhere.
class Fit {
 public:
  Fit(const Json& system, const std::string& where, const MeasuredJobs& jobs,
      const IterationPredictor& predictor, const CalibrationOptions& options)
      : base_(system), where_(where), jobs_(jobs), predictor_(predictor), options_(options) {
    const SystemSpec given = system_from_json(system, where);
    const std::set<std::string> groups = groups_fitted_on(jobs, options.hold_out);
    add_comparisons(given, groups);
    std::set<std::string> rows;
    for (const TimeComparison& entry : result_.comparisons) {
      if (entry.fitted_on) rows.insert(entry.row);
    }
    for (const std::string& key : numbers_for(static_cast<int64_t>(rows.size()))) {
      const FitRange& range = fit_range(key);
      const double start = std::clamp(system_value(given, key), range.low, range.high);
      logs_.push_back(std::log(start));
      result_.numbers.push_back({key, system_value(given, key), 0});
    }
  }

  Calibration run() {
    double reach = std::log(3.0);
    for (int round = 0; round < kRounds; ++round) {
      for (size_t i = 0; i < logs_.size(); ++i) search_line(i, reach);
      reach = std::max(reach * 0.85, kLeastReach);
    }
    finish();
    return std::move(result_);
  }

 private:
  static constexpr int kRounds = 40;
  static constexpr int kSteps = 24;
  static constexpr double kLeastReach = 0.02;

  std::vector<std::string> numbers_for(int64_t rows) const {
    std::vector<std::string> numbers = options_.numbers;
    if (numbers.empty()) {
      for (const char* key : kDefaultNumbers) {
        if (kRowsPerNumber * static_cast<int64_t>(numbers.size() + 1) <= rows) {
          numbers.push_back(key);
        }
      }
    }
    const int64_t needed =
        kRowsPerNumber * std::max<int64_t>(1, static_cast<int64_t>(numbers.size()));
    if (rows < needed) {
      throw InvalidInput(where_, "rows", fmt::format("{} rows to fit on", rows),
                         fmt::format("{} or more, three per fitted number", needed));
    }
    return numbers;
  }

  void add_comparisons(const SystemSpec& given, const std::set<std::string>& groups) {
    for (const MeasuredJob& row : jobs_.rows) {
      const std::vector<double> times = predict(row, given);
      size_t next = 0;
      const auto add = [&](const char* what, double measured, double peer) {
        if (!(measured > 0)) return;
        TimeComparison entry{.row = row.id, .group = row.group, .what = what};
        entry.measured_ns = measured;
        entry.unfitted_ns = times[next++];
        entry.peer_ns = peer;
        entry.fitted_on = groups.contains(row.group);
        result_.comparisons.push_back(std::move(entry));
      };
      add("iteration", row.iteration_ns, row.peer_iteration_ns);
      add("layer forward", row.layer_forward_ns, 0);
      add("layer backward", row.layer_backward_ns, 0);
    }
  }

  /// Predictions of a row's measured times, in the order of add_comparisons().
  std::vector<double> predict(const MeasuredJob& row, const SystemSpec& system) const {
    std::vector<double> times;
    if (row.iteration_ns > 0) times.push_back(predictor_(row.job, system));
    if (row.layer_forward_ns > 0 || row.layer_backward_ns > 0) {
      JobCost cost(row.job, system);
      const PartTimes& part = cost.layer(0, 1.0);
      if (row.layer_forward_ns > 0) times.push_back(part.forward_ns);
      if (row.layer_backward_ns > 0) times.push_back(part.backward_ns() + part.recompute_ns);
    }
    return times;
  }

  Json system_at(const std::vector<double>& logs) const {
    Json system = base_;
    for (size_t i = 0; i < logs.size(); ++i) {
      set_system_value(system, result_.numbers[i].key, std::exp(logs[i]));
    }
    return system;
  }

  double loss(const std::vector<double>& logs) const {
    const SystemSpec system = system_from_json(system_at(logs), where_);
    double sum = 0;
    size_t at = 0;
    for (const MeasuredJob& row : jobs_.rows) {
      const int64_t count =
          (row.iteration_ns > 0) + (row.layer_forward_ns > 0) + (row.layer_backward_ns > 0);
      const bool used = result_.comparisons[at].fitted_on;
      if (used) {
        for (const double time : predict(row, system)) {
          const double error = std::log(time / result_.comparisons[at].measured_ns);
          sum += error * error;
          ++at;
        }
      } else {
        at += static_cast<size_t>(count);
      }
      if (at == result_.comparisons.size()) break;
    }
    return sum;
  }

  void search_line(size_t i, double reach) {
    const FitRange& range = fit_range(result_.numbers[i].key);
    double low = std::max(logs_[i] - reach, std::log(range.low));
    double high = std::min(logs_[i] + reach, std::log(range.high));
    std::vector<double> at = logs_;
    const auto value = [&](double x) {
      at[i] = x;
      return loss(at);
    };
    constexpr double kGolden = 0.6180339887498949;
    double left = high - kGolden * (high - low), right = low + kGolden * (high - low);
    double left_loss = value(left), right_loss = value(right);
    for (int step = 0; step < kSteps; ++step) {
      if (left_loss <= right_loss) {
        high = right;
        right = left;
        right_loss = left_loss;
        left = high - kGolden * (high - low);
        left_loss = value(left);
      } else {
        low = left;
        left = right;
        left_loss = right_loss;
        right = low + kGolden * (high - low);
        right_loss = value(right);
      }
    }
    const double best = left_loss <= right_loss ? left : right;
    if (value(best) < loss(logs_)) logs_[i] = best;
  }

  void finish() {
    Json system = system_at(logs_);
    const SystemSpec spec = system_from_json(system, where_);
    size_t at = 0;
    for (const MeasuredJob& row : jobs_.rows) {
      for (const double time : predict(row, spec)) {
        result_.comparisons[at++].predicted_ns = time;
      }
    }
    for (FittedNumber& number : result_.numbers) number.after = system_value(spec, number.key);
    system["provenance"] = "fitted";
    system["fit"] = describe();
    result_.system = std::move(system);
  }

  Json describe() const {
    Json fit;
    fit["measured"] = jobs_.source;
    for (const FittedNumber& number : result_.numbers) {
      fit["numbers"][number.key] = {{"before", number.before}, {"after", number.after}};
    }
    const auto summary = [](const ErrorSummary& errors) {
      return Json{{"times", errors.count},
                  {"mean_error_fraction", std::round(errors.mean_fraction * 1e5) / 1e5},
                  {"largest_error_fraction", std::round(errors.largest_fraction * 1e5) / 1e5}};
    };
    for (const bool seen : {true, false}) {
      Json& side = fit[seen ? "fitted_on" : "tested_on"];
      side = summary(result_.summary(seen));
      side["without_fit"] = summary(result_.unfitted_summary(seen));
      side["rows"] = Json::array();
      for (const TimeComparison& entry : result_.comparisons) {
        if (entry.fitted_on != seen) continue;
        const bool again = !side["rows"].empty() && side["rows"].back() == Json(entry.row);
        if (!again) side["rows"].push_back(entry.row);
      }
    }
    return fit;
  }

  const Json& base_;
  const std::string& where_;
  const MeasuredJobs& jobs_;
  const IterationPredictor& predictor_;
  const CalibrationOptions& options_;
  std::vector<double> logs_;
  Calibration result_;
};

template <class Error>
ErrorSummary summarise(const std::vector<TimeComparison>& entries, bool fitted_on,
                       const Error& error) {
  ErrorSummary summary;
  for (const TimeComparison& entry : entries) {
    if (entry.fitted_on != fitted_on) continue;
    const double magnitude = std::abs(error(entry));
    if (std::isnan(magnitude)) continue;
    ++summary.count;
    summary.mean_fraction += magnitude;
    summary.largest_fraction = std::max(summary.largest_fraction, magnitude);
  }
  if (summary.count > 0) summary.mean_fraction /= static_cast<double>(summary.count);
  return summary;
}

}  // namespace

ErrorSummary Calibration::summary(bool fitted_on) const {
  return summarise(comparisons, fitted_on,
                   [](const TimeComparison& entry) { return entry.error_fraction(); });
}

ErrorSummary Calibration::unfitted_summary(bool fitted_on) const {
  return summarise(comparisons, fitted_on,
                   [](const TimeComparison& entry) { return entry.unfitted_error_fraction(); });
}

ErrorSummary Calibration::peer_summary(bool fitted_on) const {
  return summarise(comparisons, fitted_on, [](const TimeComparison& entry) {
    return entry.peer_ns > 0 ? entry.peer_ns / entry.measured_ns - 1 : std::nan("");
  });
}

Calibration calibrate(const Json& system, const std::string& where, const MeasuredJobs& jobs,
                      const IterationPredictor& predictor, const CalibrationOptions& options) {
  return Fit(system, where, jobs, predictor, options).run();
}

}  // namespace bagualu
