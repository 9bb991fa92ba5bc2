#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "bagualu/model/routing_cells.h"
#include "bagualu/model/routing_trace.h"

namespace bagualu {

/// Imbalance above which shares are counted: calm, the threshold of a known policy, and the largest
/// the paper measured (97.1 % of its iterations below 1.2, the others up to 2.6).
inline constexpr std::array<double, 3> kImbalanceMarks = {1.2, 2.0, 2.6};
inline constexpr int kAutocorrelationLags = 8;

/// Distribution of factors; quantiles by nearest rank. All 0 if count is 0.
struct FactorSummary {
  int64_t count = 0;
  double mean = 0;
  double p50 = 0;
  double p90 = 0;
  double p99 = 0;
  double largest = 0;
  std::array<double, 3> above_fraction = {};  ///< share above kImbalanceMarks
};

/// Imbalance of one iteration: over layers, the largest of (hottest rank / mean), rows summed over
/// the iteration's micro-batches.
struct IterationImbalance {
  int32_t step = 0;
  double factor = 0;
  int32_t layer = 0;  ///< where the factor is reached
  int32_t rank = 0;
};

struct LayerImbalance {
  int32_t layer = 0;
  int64_t ranks = 0;            ///< that the layer usually has
  FactorSummary iterations;     ///< of this layer alone
  double hottest_fraction = 0;  ///< of iterations in which it is the hottest layer
};

struct RankImbalance {
  int32_t rank = 0;
  double mean = 0;  ///< rows over balanced rows, over iterations and layers
  double largest = 0;
  double hottest_fraction = 0;  ///< of (iteration, layer) in which it is the hottest rank
  int64_t missing = 0;          ///< cells of its layers in which it has no record
};

/// A factor that begins high and decays.
struct ColdStart {
  bool present = false;
  int64_t iterations = 0;  ///< until the factor has settled
  double start = 0;        ///< mean factor of the first window
  double settled = 0;      ///< mean factor of the last half
};

struct RoutingStats {
  int64_t steps = 0;         ///< with a factor
  int64_t microbatches = 0;  ///< most of any step
  int64_t incomplete_cells = 0;
  int64_t cells = 0;
  FactorSummary iterations;
  FactorSummary per_microbatch;  ///< the same with the rows of one micro-batch
  /// Of the iterations' factors, lag 1 to 8: sum of products of deviations over the pairs of steps
  /// that far apart, over the sum of squared deviations. Empty where no pair or no variance.
  std::array<std::optional<double>, kAutocorrelationLags> autocorrelation;
  std::vector<double> by_tenth;  ///< mean factor of each tenth of the run, fewer if it is short
  ColdStart cold_start;
  std::vector<LayerImbalance> layers;  ///< ascending
  std::vector<RankImbalance> ranks;    ///< ascending
  std::vector<int32_t> absent_ranks;   ///< from 0 to the largest rank, without any record
  std::vector<IterationImbalance> series;
};

/// Requires: a trace with records. Ranks of an expert trace are experts.
RoutingStats routing_stats(const RoutingTrace& trace, const TraceReading& reading = {});

FactorSummary summarise(std::vector<double> factors);
std::array<std::optional<double>, kAutocorrelationLags> autocorrelation(
    const std::vector<IterationImbalance>& series);
/// Windows of a fiftieth of the run; settled once a window's mean is at most 1.05 times the mean of
/// the last half; present if the first window is above 1.1 times that mean and settling takes more
/// than one window.
ColdStart find_cold_start(const std::vector<IterationImbalance>& series);

}  // namespace bagualu
