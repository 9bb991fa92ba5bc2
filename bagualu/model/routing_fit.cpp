#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/model/routing_cells.h"
#include "bagualu/model/routing_source.h"
#include "bagualu/model/routing_stats.h"

namespace bagualu {
namespace {

constexpr size_t kMostQuantiles = 1001;
constexpr double kLargestAutocorrelation = 0.95;

/// Six digits: what a trace can tell, and what a file shows.
double rounded(double value) { return std::round(value * 1e6) / 1e6; }

/// Straight lines between the sorted factors.
std::vector<double> quantiles_of(std::vector<double> factors) {
  std::sort(factors.begin(), factors.end());
  const size_t count = std::min(kMostQuantiles, factors.size());
  std::vector<double> quantiles;
  for (size_t i = 0; i < count; ++i) {
    const double place = count == 1
                             ? 0
                             : static_cast<double>(i) * static_cast<double>(factors.size() - 1) /
                                   static_cast<double>(count - 1);
    const size_t low = std::min(static_cast<size_t>(place), factors.size() - 1);
    const size_t high = std::min(low + 1, factors.size() - 1);
    const double part = place - static_cast<double>(low);
    const double value = factors[low] + part * (factors[high] - factors[low]);
    quantiles.push_back(std::max(rounded(value), quantiles.empty() ? 1.0 : quantiles.back()));
  }
  return quantiles;
}

/// Of one iteration, by layer: the hottest rank, and what it had in each micro-batch.
struct LayerOfStep {
  std::map<int32_t, int64_t> rows;  ///< by rank
  std::vector<const RoutedCell*> cells;
  double balanced = 0;
  double factor = 0;
  int32_t hottest = 0;

  void find_hottest() {
    int64_t most = -1;
    int64_t total = 0;
    for (const auto& [rank, received] : rows) {
      total += received;
      if (received > most) hottest = rank;
      most = std::max(most, received);
    }
    balanced = static_cast<double>(total) / static_cast<double>(rows.size());
    factor = balanced > 0 ? static_cast<double>(most) / balanced : 0;
  }
};

class SpreadFit {
 public:
  explicit SpreadFit(const RoutingTrace& trace) : cells_(trace, {}) {
    const std::vector<RoutedCell>& cells = cells_.cells();
    for (size_t first = 0; first < cells.size();) {
      std::map<int32_t, LayerOfStep> layers;
      size_t next = first;
      for (; next < cells.size() && cells[next].step() == cells[first].step(); ++next) {
        if (cells[next].complete && cells[next].balanced > 0) add(cells[next], &layers);
      }
      close_step(&layers);
      first = next;
    }
  }

  double microbatch_spread() const {
    return factors_ == 0 ? 0 : std::sqrt(squares_ / static_cast<double>(factors_));
  }
  double rank_agreement() const {
    return others_ == 0 ? 1 : static_cast<double>(agree_) / static_cast<double>(others_);
  }

  /// Mean excess of a layer over 1, as a share of the iteration's hottest layer's, and the spread
  /// of these shares around the layer's own mean, pooled.
  double layer_spread() const {
    double squares = 0;
    double mean_squares = 0;
    int64_t count = 0;
    for (const auto& [layer, shares] : shares_) {
      double sum = 0;
      for (const double share : shares) sum += share;
      const double mean = sum / static_cast<double>(shares.size());
      for (const double share : shares) squares += (share - mean) * (share - mean);
      mean_squares += mean * mean * static_cast<double>(shares.size());
      count += static_cast<int64_t>(shares.size());
    }
    if (shares_.size() < 2 || count == 0 || mean_squares <= 0) return 0;
    // A uniform draw from 1 - s to 1 has deviation s / sqrt(12) around 1 - s / 2.
    const double ratio = std::sqrt(12 * squares / mean_squares);
    return std::min(1.0, ratio / (1 + ratio / 2));
  }

 private:
  static void add(const RoutedCell& cell, std::map<int32_t, LayerOfStep>* layers) {
    LayerOfStep& layer = (*layers)[cell.layer()];
    layer.cells.push_back(&cell);
    for (const RoutedRecord* r = cell.begin; r != cell.end; ++r) layer.rows[r->rank] += r->tokens;
  }

  void close_step(std::map<int32_t, LayerOfStep>* layers) {
    const LayerOfStep* hottest = nullptr;
    for (auto& [number, layer] : *layers) {
      layer.find_hottest();
      add_microbatches(layer);
      if (hottest == nullptr || layer.factor > hottest->factor) hottest = &layer;
    }
    if (hottest == nullptr) return;
    for (const auto& [number, layer] : *layers) {
      if (hottest->factor > 1) {
        shares_[number].push_back((layer.factor - 1) / (hottest->factor - 1));
      }
      if (&layer == hottest) continue;
      ++others_;
      agree_ += layer.hottest == hottest->hottest;
    }
  }

  void add_microbatches(const LayerOfStep& layer) {
    const size_t count = layer.cells.size();
    if (count < 2 || layer.factor <= 0) return;
    std::vector<double> factors;
    double sum = 0;
    for (const RoutedCell* cell : layer.cells) {
      for (const RoutedRecord* r = cell->begin; r != cell->end; ++r) {
        if (r->rank != layer.hottest) continue;
        factors.push_back(static_cast<double>(r->tokens) / cell->balanced);
        sum += factors.back();
      }
    }
    if (factors.size() < 2 || sum <= 0) return;
    const double mean = sum / static_cast<double>(factors.size());
    for (const double factor : factors) {
      squares_ += (factor / mean - 1) * (factor / mean - 1);
    }
    // Not one less: the iteration's factor is known, not estimated from these.
    factors_ += static_cast<int64_t>(factors.size());
  }

  RoutedCells cells_;
  double squares_ = 0;
  int64_t factors_ = 0;
  int64_t agree_ = 0;
  int64_t others_ = 0;
  std::map<int32_t, std::vector<double>> shares_;
};

/// Share of layers on the common rank, of the share that agree with the hottest layer: two layers
/// agree if both lie on the common rank, else by chance in 1 of `ranks`.
double agreement_of_pairs(double seen, int64_t ranks) {
  if (ranks < 2) return 1;
  const double chance = 1 / static_cast<double>(ranks);
  return std::sqrt(std::clamp((seen - chance) / (1 - chance), 0.0, 1.0));
}

}  // namespace

RoutingShape fit_routing(const RoutingTrace& trace) {
  BGL_CHECK(!trace.records.empty());
  const RoutingStats stats = routing_stats(trace);
  RoutingShape shape;
  shape.kind = "fitted";
  std::vector<double> factors;
  int64_t calm = 0;
  for (const IterationImbalance& iteration : stats.series) {
    factors.push_back(iteration.factor);
    calm += iteration.factor < shape.calm_limit;
  }
  if (factors.empty()) factors = {1.0};  // no cell with all of its ranks: nothing to compare
  shape.largest = rounded(*std::max_element(factors.begin(), factors.end()));
  shape.calm_fraction = rounded(static_cast<double>(calm) / static_cast<double>(factors.size()));
  shape.quantiles = quantiles_of(std::move(factors));
  shape.autocorrelation =
      rounded(std::clamp(stats.autocorrelation[0].value_or(0), 0.0, kLargestAutocorrelation));
  double hottest = 0;
  int64_t ranks = 1;
  for (const LayerImbalance& layer : stats.layers) {
    hottest = std::max(hottest, layer.iterations.mean);
    ranks = std::max(ranks, layer.ranks);
  }
  for (const LayerImbalance& layer : stats.layers) {
    // A layer whose cells all lack a rank has no mean: taken to be even.
    const double mean = std::max(1.0, layer.iterations.mean);
    shape.layer_profile.push_back(rounded(std::min(1.0, mean / std::max(1.0, hottest))));
  }
  const SpreadFit spread(trace);
  shape.layer_spread = rounded(spread.layer_spread());
  shape.rank_agreement = rounded(agreement_of_pairs(spread.rank_agreement(), ranks));
  shape.microbatch_spread = rounded(std::min(1.0, spread.microbatch_spread()));
  return shape;
}

}  // namespace bagualu
