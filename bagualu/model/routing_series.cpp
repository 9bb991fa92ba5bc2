#include "bagualu/model/routing_series.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/model/routing_random.h"

namespace bagualu {
namespace {

constexpr double kReach = 8.5;  // Phi(-8.5) = 1e-17 is 0 beside 1
constexpr int kPerUnit = 128;
constexpr int kPoints = static_cast<int>(2 * kReach * kPerUnit) + 1;
constexpr double kLargestLatent = 0.998;
constexpr int kTerms = 96;  // of the Hermite series

/// exp(-x), x >= 0: Taylor series of x / 64, squared six times.
double exp_of_minus(double x) {
  const double y = -x / 64;
  double term = 1;
  double sum = 1;
  for (int k = 1; k <= 16; ++k) {
    term = term * y / k;
    sum += term;
  }
  for (int k = 0; k < 6; ++k) sum *= sum;
  return sum;
}

double density(double z) { return 0.3989422804014327 * exp_of_minus(z * z / 2); }

double place_of(int i) { return static_cast<double>(i) / kPerUnit - kReach; }

/// Simpson's rule from point to point.
std::vector<double> make_table() {
  std::vector<double> table(kPoints);
  double sum = 0;
  for (int i = 1; i < kPoints; ++i) {
    const double a = place_of(i - 1);
    const double b = place_of(i);
    sum += (density(a) + 4 * density((a + b) / 2) + density(b)) / (6.0 * kPerUnit);
    table[static_cast<size_t>(i)] = sum;
  }
  return table;
}

const std::vector<double>& table() {
  static const std::vector<double> cdf = make_table();
  return cdf;
}

/// Squares of the Hermite coefficients of z -> quantile(Phi(z)), degree 1 upwards, and one entry
/// for all higher ones; divided by the variance. Empty if there is none.
std::vector<double> hermite_shares(const QuantilePoints& points) {
  std::vector<double> coefficients(kTerms + 1);
  double squares = 0;
  constexpr double kStep = 1.0 / 64;
  for (int i = -544; i <= 544; ++i) {
    const double z = i * kStep;
    const double weight = density(z) * kStep;
    const double g = points.at(normal_cdf(z));
    squares += weight * g * g;
    double before = 0;
    double h = 1;
    for (int n = 0; n <= kTerms; ++n) {
      coefficients[static_cast<size_t>(n)] += weight * g * h;
      const double next = (z * h - std::sqrt(static_cast<double>(n)) * before) /
                          std::sqrt(static_cast<double>(n + 1));
      before = h;
      h = next;
    }
  }
  const double variance = squares - coefficients[0] * coefficients[0];
  if (variance <= 1e-12 * squares) return {};
  std::vector<double> shares;
  double rest = 1;
  for (int n = 1; n <= kTerms; ++n) {
    const double c = coefficients[static_cast<size_t>(n)];
    shares.push_back(c * c / variance);
    rest -= shares.back();
  }
  shares.push_back(std::max(0.0, rest));
  return shares;
}

/// Lag-1 autocorrelation of z that gives the factors the wanted one: bisection, the series rises.
double latent_for(const QuantilePoints& points, double wanted) {
  if (wanted <= 0) return 0;
  const std::vector<double> shares = hermite_shares(points);
  if (shares.empty()) return 0;
  double low = 0;
  double high = kLargestLatent;
  for (int round = 0; round < 50; ++round) {
    const double phi = (low + high) / 2;
    double sum = 0;
    for (auto share = shares.rbegin(); share != shares.rend(); ++share) sum = (sum + *share) * phi;
    (sum < wanted ? low : high) = phi;
  }
  return (low + high) / 2;
}

}  // namespace

double QuantilePoints::at(double f) const {
  const auto after = std::upper_bound(fraction.begin(), fraction.end(), f);
  if (after == fraction.end()) return value.back();
  const auto i = static_cast<size_t>(after - fraction.begin());
  if (i == 0) return value.front();
  const double part = (f - fraction[i - 1]) / (fraction[i] - fraction[i - 1]);
  return value[i - 1] + part * (value[i] - value[i - 1]);
}

double QuantilePoints::mean() const {
  double sum = value.size() == 1 ? value[0] : 0;
  for (size_t i = 1; i < value.size(); ++i) {
    sum += (fraction[i] - fraction[i - 1]) * (value[i] + value[i - 1]) / 2;
  }
  return sum;
}

double normal_cdf(double z) {
  const double place = (z + kReach) * kPerUnit;
  if (place <= 0) return 0;
  if (place >= kPoints - 1) return 1;
  const auto i = static_cast<size_t>(place);
  return table()[i] + (place - static_cast<double>(i)) * (table()[i + 1] - table()[i]);
}

double normal_quantile(double fraction) {
  const std::vector<double>& cdf = table();
  const auto after = std::upper_bound(cdf.begin(), cdf.end(), fraction);
  if (after == cdf.end()) return kReach;
  if (after == cdf.begin()) return -kReach;
  const auto i = static_cast<int>(after - cdf.begin());
  const double low = *(after - 1);
  return place_of(i - 1) + (fraction - low) / (*after - low) / kPerUnit;
}

FactorSeries::FactorSeries(QuantilePoints points, double autocorrelation, uint64_t seed)
    : points_(std::move(points)),
      seed_(seed),
      mean_(points_.mean()),
      latent_(latent_for(points_, autocorrelation)) {
  BGL_CHECK(!points_.value.empty() && points_.value.size() == points_.fraction.size());
  double squares = 0;
  for (double w = 1; w > 1e-3; w *= latent_) {
    weights_.push_back(w);
    squares += w * w;
  }
  const double scale = 1 / std::sqrt(squares);
  for (double& w : weights_) w *= scale;
}

double FactorSeries::fraction(int64_t iteration) const {
  const auto draw = [&](int64_t t) {
    return RandomBits(random_key({seed_, 1, static_cast<uint64_t>(t)})).uniform();
  };
  if (weights_.size() == 1) return draw(iteration);
  double z = 0;
  for (size_t k = 0; k < weights_.size(); ++k) {
    z += weights_[k] * normal_quantile(draw(iteration - static_cast<int64_t>(k)));
  }
  return std::clamp(normal_cdf(z), 1e-15, 1 - 1e-15);
}

double FactorSeries::below(int64_t iteration, double u, int64_t replicas) const {
  double power = 1;
  for (int64_t n = replicas; n > 0; n /= 2) {
    if (n % 2 == 1) power *= u;
    u *= u;
  }
  return points_.at(fraction(iteration) * power);
}

}  // namespace bagualu
