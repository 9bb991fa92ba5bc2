#include "bagualu/cost/figure_fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/cost/fit_range.h"

namespace bagualu {
namespace {

constexpr int kRounds = 15;
constexpr int kHalvings = 5;
constexpr double kDifference = 0.05;  // of a logarithm
constexpr double kLongestStep = 0.5;  // of a logarithm, of any number in a round

using Vector = std::vector<double>;

/// x with a x = b by elimination with pivots. Returns: false if a is singular.
bool solve_linear(std::vector<Vector> a, Vector b, Vector* x) {
  const size_t n = b.size();
  for (size_t column = 0; column < n; ++column) {
    size_t pivot = column;
    for (size_t row = column; row < n; ++row) {
      if (std::abs(a[row][column]) > std::abs(a[pivot][column])) pivot = row;
    }
    if (std::abs(a[pivot][column]) < 1e-9) return false;
    std::swap(a[pivot], a[column]);
    std::swap(b[pivot], b[column]);
    for (size_t row = column + 1; row < n; ++row) {
      const double factor = a[row][column] / a[column][column];
      for (size_t k = column; k < n; ++k) a[row][k] -= factor * a[column][k];
      b[row] -= factor * b[column];
    }
  }
  x->assign(n, 0);
  for (size_t row = n; row-- > 0;) {
    double sum = b[row];
    for (size_t k = row + 1; k < n; ++k) sum -= a[row][k] * (*x)[k];
    (*x)[row] = sum / a[row][row];
  }
  return true;
}

double largest_magnitude(const Vector& values) {
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

class Solver {
 public:
  Solver(const Json& system, const std::string& where, const std::vector<std::string>& keys,
         std::vector<PublishedFigure> figures, const FigurePredictor& predictor)
      : base_(system), where_(where), predictor_(predictor) {
    if (keys.size() != figures.size() || keys.empty()) {
      throw InvalidInput(where, "numbers to fit", fmt::format("{}", keys.size()),
                         fmt::format("{}, as many as figures", figures.size()));
    }
    result_.figures = std::move(figures);
    const SystemSpec given = system_from_json(system, where);
    for (const std::string& key : keys) {
      const FitRange& range = fit_range(key);
      const double before = system_value(given, key);
      result_.numbers.push_back({key, before, before});
      at_.push_back(std::log(std::clamp(before, range.low, range.high)));
    }
    const Vector first = predictor_(given);
    for (size_t i = 0; i < first.size(); ++i) result_.figures[i].unfitted = first[i];
  }

  FigureFit run() {
    errors_ = errors_at(at_);
    for (int round = 0; round < kRounds && !met(); ++round) {
      if (!improve()) break;
    }
    finish();
    return std::move(result_);
  }

 private:
  bool met() const { return largest_magnitude(errors_) <= kFigureTolerance; }

  Json system_at(const Vector& logs) const {
    Json system = base_;
    for (size_t i = 0; i < logs.size(); ++i) {
      set_system_value(system, result_.numbers[i].key, std::exp(logs[i]));
    }
    return system;
  }

  /// log(predicted / published) of every figure.
  Vector errors_at(const Vector& logs) {
    ++result_.predictions;
    const Vector predicted = predictor_(system_from_json(system_at(logs), where_));
    BGL_CHECK(predicted.size() == result_.figures.size(), predicted.size());
    Vector errors;
    for (size_t i = 0; i < predicted.size(); ++i) {
      errors.push_back(std::log(predicted[i] / result_.figures[i].value));
    }
    return errors;
  }

  Vector clamped(Vector logs) const {
    for (size_t i = 0; i < logs.size(); ++i) {
      const FitRange& range = fit_range(result_.numbers[i].key);
      logs[i] = std::clamp(logs[i], std::log(range.low), std::log(range.high));
    }
    return logs;
  }

  /// One step of Newton's method. Returns: false if none helps.
  bool improve() {
    const size_t n = at_.size();
    std::vector<Vector> slopes(n, Vector(n));
    for (size_t k = 0; k < n; ++k) {
      // Towards the inside, where a bound is near.
      Vector moved = at_;
      moved[k] += kDifference;
      moved = clamped(std::move(moved));
      if (moved[k] - at_[k] < kDifference / 2) moved[k] = at_[k] - kDifference;
      const Vector errors = errors_at(moved);
      for (size_t i = 0; i < n; ++i) slopes[i][k] = (errors[i] - errors_[i]) / (moved[k] - at_[k]);
    }
    Vector step;
    if (solve_linear(slopes, errors_, &step) && move(step)) return true;
    // A bound may be in the way of one number: then the best that each alone can do.
    for (size_t k = 0; k < n; ++k) {
      double product = 0, square = 0;
      for (size_t i = 0; i < n; ++i) {
        product += slopes[i][k] * errors_[i];
        square += slopes[i][k] * slopes[i][k];
      }
      Vector alone(n, 0);
      alone[k] = square > 0 ? product / square : 0;
      if (move(alone)) return true;
    }
    return false;
  }

  /// Goes against `step`, or as far as it helps.
  bool move(const Vector& step) {
    const size_t n = at_.size();
    const double longest = largest_magnitude(step);
    if (!(longest > 0)) return false;
    double share = longest > kLongestStep ? kLongestStep / longest : 1;
    for (int halving = 0; halving < kHalvings; ++halving, share /= 2) {
      Vector next = at_;
      for (size_t i = 0; i < n; ++i) next[i] -= share * step[i];
      next = clamped(std::move(next));
      const Vector errors = errors_at(next);
      if (largest_magnitude(errors) >= largest_magnitude(errors_)) continue;
      at_ = next;
      errors_ = errors;
      return true;
    }
    return false;
  }

  void finish() {
    Json system = system_at(at_);
    const SystemSpec spec = system_from_json(system, where_);
    Json fit;
    for (FittedNumber& number : result_.numbers) {
      number.after = system_value(spec, number.key);
      fit["numbers"][number.key] = {{"before", number.before}, {"after", number.after}};
    }
    for (size_t i = 0; i < errors_.size(); ++i) {
      PublishedFigure& figure = result_.figures[i];
      figure.predicted = figure.value * std::exp(errors_[i]);
      fit["figures"][figure.name] = {{"published", figure.value},
                                     {"fitted", std::round(figure.predicted * 1e5) / 1e5},
                                     {"without_fit", std::round(figure.unfitted * 1e5) / 1e5}};
    }
    result_.solved = met();
    fit["solved"] = result_.solved;
    system["provenance"] = "fitted";
    system["fit"] = std::move(fit);
    result_.system = std::move(system);
  }

  const Json& base_;
  const std::string& where_;
  const FigurePredictor& predictor_;
  Vector at_;
  Vector errors_;
  FigureFit result_;
};

}  // namespace

FigureFit fit_figures(const Json& system, const std::string& where,
                      const std::vector<std::string>& keys, std::vector<PublishedFigure> figures,
                      const FigurePredictor& predictor) {
  return Solver(system, where, keys, std::move(figures), predictor).run();
}

}  // namespace bagualu
