// The factors of a run's iterations: any distribution, with a wanted lag-1 autocorrelation.
#pragma once

#include <cstdint>
#include <vector>

namespace bagualu {

/// A distribution by points: quantile value[i] at fraction[i], straight lines in between.
struct QuantilePoints {
  std::vector<double> fraction;  ///< ascending, from 0 to 1
  std::vector<double> value;     ///< ascending

  double at(double f) const;
  double mean() const;
};

/// z(t) = sum over k of w[k] * e(t - k), w geometric with sum of squares 1, is the stationary
/// AR(1) process written as a moving average, so that any iteration can be asked for. e are
/// independent normal numbers of (seed, t). The factor is the distribution's quantile at Phi(z):
/// the marginal distribution is exact, and z's own autocorrelation is chosen so that the factors
/// have the wanted one (Hermite series of the map from z to the factor).
/// Only + - * / and sqrt, so that every compiler and libm gives the same bits.
class FactorSeries {
 public:
  /// Requires: 0 <= autocorrelation <= 0.95.
  FactorSeries(QuantilePoints points, double autocorrelation, uint64_t seed);

  /// Where iteration t lies in the distribution, strictly between 0 and 1.
  double fraction(int64_t iteration) const;
  /// The factor of fraction(t) * u^replicas: given that the largest of `replicas` independent
  /// draws lies at fraction(t), another draw if u is uniform.
  double below(int64_t iteration, double u, int64_t replicas) const;
  double factor(int64_t iteration) const { return points_.at(fraction(iteration)); }
  double mean() const { return mean_; }
  double latent_autocorrelation() const { return latent_; }

 private:
  QuantilePoints points_;
  uint64_t seed_;
  double mean_;
  double latent_ = 0;
  std::vector<double> weights_;
};

/// Phi of a table with straight lines in between (exact to 4e-6), and its inverse.
double normal_cdf(double z);
double normal_quantile(double fraction);

}  // namespace bagualu
