#include "bagualu/model/routing_stats.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <unordered_map>
#include <utility>

namespace bagualu {
namespace {

/// Rows of one layer in one step, micro-batches added up as they come.
struct LayerRows {
  std::vector<std::pair<int32_t, int64_t>> rows;  ///< rank, rows; by rank
  double balanced = 0;

  /// Mean over the ranks, as over those of one cell; not the sum of the cells' means, since a rank
  /// that joins or leaves inside the step would then be compared with cells that it is not in.
  void take_mean() {
    int64_t total = 0;
    for (const auto& [rank, received] : rows) total += received;
    balanced = static_cast<double>(total) / static_cast<double>(std::max<size_t>(1, rows.size()));
  }

  void add(const RoutedCell& cell) {
    balanced += cell.balanced;
    std::vector<std::pair<int32_t, int64_t>> sum;
    sum.reserve(rows.size());
    auto mine = rows.begin();
    for (const RoutedRecord* r = cell.begin; r != cell.end; ++r) {
      while (mine != rows.end() && mine->first < r->rank) sum.push_back(*mine++);
      const bool same = mine != rows.end() && mine->first == r->rank;
      sum.emplace_back(r->rank, r->tokens + (same ? (mine++)->second : 0));
    }
    sum.insert(sum.end(), mine, rows.end());
    rows = std::move(sum);
  }
};

/// The hottest rank of a layer.
struct Hottest {
  double factor = 0;
  int32_t layer = 0;
  int32_t rank = 0;

  void take(double other, int32_t of_layer, int32_t of_rank) {
    if (other > factor) *this = {other, of_layer, of_rank};
  }
};

class StatsBuilder {
 public:
  StatsBuilder(const RoutingTrace& trace, const TraceReading& reading)
      : split_(trace, reading),
        ranks_(split_.all_ranks()),
        by_rank_(ranks_.size()),
        known_mean_(reading.balanced_rows > 0) {}

  RoutingStats build() {
    const std::vector<RoutedCell>& cells = split_.cells();
    for (size_t first = 0; first < cells.size();) {
      size_t next = first;
      while (next < cells.size() && cells[next].step() == cells[first].step()) ++next;
      add_step(first, next);
      first = next;
    }
    stats_.cells = static_cast<int64_t>(cells.size());
    stats_.incomplete_cells = split_.incomplete();
    stats_.steps = static_cast<int64_t>(stats_.series.size());
    std::vector<double> factors;
    for (const IterationImbalance& i : stats_.series) factors.push_back(i.factor);
    stats_.by_tenth = tenths(factors);
    stats_.iterations = summarise(std::move(factors));
    stats_.per_microbatch = summarise(std::move(microbatch_factors_));
    stats_.autocorrelation = autocorrelation(stats_.series);
    stats_.cold_start = find_cold_start(stats_.series);
    finish_layers();
    finish_ranks();
    return std::move(stats_);
  }

 private:
  struct OfRank {
    double sum = 0;
    int64_t count = 0;
    double largest = 0;
    int64_t hottest = 0;
    int64_t records = 0;
  };

  size_t place(int32_t rank) const {
    return static_cast<size_t>(std::lower_bound(ranks_.begin(), ranks_.end(), rank) -
                               ranks_.begin());
  }

  /// Cells [first, next) are one step, by micro-batch and layer.
  void add_step(size_t first, size_t next) {
    std::map<int32_t, LayerRows> layers;
    Hottest in_microbatch;
    int64_t microbatches = 0;
    for (size_t i = first; i < next; ++i) {
      const RoutedCell& cell = split_.cells()[i];
      if (i == first || cell.microbatch() != split_.cells()[i - 1].microbatch()) {
        ++microbatches;
        close_microbatch(&in_microbatch);
      }
      add_cell(cell, &layers[cell.layer()], &in_microbatch);
    }
    close_microbatch(&in_microbatch);
    stats_.microbatches = std::max(stats_.microbatches, microbatches);
    close_step(split_.cells()[first].step(), layers);
  }

  void add_cell(const RoutedCell& cell, LayerRows* layer, Hottest* hottest) {
    for (const RoutedRecord* r = cell.begin; r != cell.end; ++r) ++by_rank_[place(r->rank)].records;
    if (!cell.complete) return;
    layer->add(cell);
    if (cell.balanced <= 0) return;
    for (const RoutedRecord* r = cell.begin; r != cell.end; ++r) {
      hottest->take(static_cast<double>(r->tokens) / cell.balanced, cell.layer(), r->rank);
    }
  }

  void close_microbatch(Hottest* hottest) {
    if (hottest->factor > 0) microbatch_factors_.push_back(hottest->factor);
    *hottest = {};
  }

  void close_step(int32_t step, std::map<int32_t, LayerRows>& layers) {
    Hottest of_step;
    for (auto& [number, layer] : layers) {
      if (!known_mean_) layer.take_mean();
      if (layer.balanced <= 0) continue;
      Hottest of_layer;
      for (const auto& [rank, rows] : layer.rows) {
        const double factor = static_cast<double>(rows) / layer.balanced;
        OfRank& of = by_rank_[place(rank)];
        of.sum += factor;
        ++of.count;
        of.largest = std::max(of.largest, factor);
        of_layer.take(factor, number, rank);
      }
      if (of_layer.factor <= 0) continue;
      ++by_rank_[place(of_layer.rank)].hottest;
      ++layer_steps_;
      layer_factors_[number].push_back(of_layer.factor);
      of_step.take(of_layer.factor, number, of_layer.rank);
    }
    if (of_step.factor <= 0) return;
    ++hottest_layer_[of_step.layer];
    stats_.series.push_back({step, of_step.factor, of_step.layer, of_step.rank});
  }

  static std::vector<double> tenths(const std::vector<double>& factors) {
    const size_t parts = std::min<size_t>(10, factors.size());
    std::vector<double> means;
    for (size_t part = 0; part < parts; ++part) {
      const auto first = factors.begin() + static_cast<long>(part * factors.size() / parts);
      const auto last = factors.begin() + static_cast<long>((part + 1) * factors.size() / parts);
      means.push_back(std::accumulate(first, last, 0.0) / static_cast<double>(last - first));
    }
    return means;
  }

  void finish_layers() {
    for (const auto& [number, ranks] : split_.ranks_of_layer()) {
      LayerImbalance layer;
      layer.layer = number;
      layer.ranks = static_cast<int64_t>(ranks.size());
      layer.iterations = summarise(std::move(layer_factors_[number]));
      if (stats_.steps > 0) {
        layer.hottest_fraction =
            static_cast<double>(hottest_layer_[number]) / static_cast<double>(stats_.steps);
      }
      stats_.layers.push_back(layer);
    }
  }

  void finish_ranks() {
    std::unordered_map<int32_t, int64_t> cells_of_layer;
    for (const RoutedCell& cell : split_.cells()) ++cells_of_layer[cell.layer()];
    std::unordered_map<int32_t, int64_t> expected;
    for (const auto& [layer, ranks] : split_.ranks_of_layer()) {
      for (const int32_t rank : ranks) expected[rank] += cells_of_layer[layer];
    }
    int32_t next = 0;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      for (; next < ranks_[i]; ++next) stats_.absent_ranks.push_back(next);
      next = ranks_[i] + 1;
      const OfRank& of = by_rank_[i];
      RankImbalance rank;
      rank.rank = ranks_[i];
      rank.largest = of.largest;
      if (of.count > 0) rank.mean = of.sum / static_cast<double>(of.count);
      if (layer_steps_ > 0) {
        rank.hottest_fraction = static_cast<double>(of.hottest) / static_cast<double>(layer_steps_);
      }
      rank.missing = std::max<int64_t>(0, expected[ranks_[i]] - of.records);
      stats_.ranks.push_back(rank);
    }
  }

  const RoutedCells split_;
  const std::vector<int32_t> ranks_;
  std::vector<OfRank> by_rank_;
  const bool known_mean_;
  std::vector<double> microbatch_factors_;
  std::map<int32_t, std::vector<double>> layer_factors_;
  std::map<int32_t, int64_t> hottest_layer_;
  int64_t layer_steps_ = 0;
  RoutingStats stats_;
};

double mean_of(const std::vector<IterationImbalance>& series, size_t first, size_t last) {
  double sum = 0;
  for (size_t i = first; i < last; ++i) sum += series[i].factor;
  return sum / static_cast<double>(last - first);
}

}  // namespace

FactorSummary summarise(std::vector<double> factors) {
  FactorSummary summary;
  summary.count = static_cast<int64_t>(factors.size());
  if (factors.empty()) return summary;
  std::sort(factors.begin(), factors.end());
  const auto n = static_cast<double>(factors.size());
  const auto quantile = [&](double q) {
    return factors[static_cast<size_t>(std::max(0.0, std::ceil(q * n) - 1))];
  };
  summary.mean = std::accumulate(factors.begin(), factors.end(), 0.0) / n;
  summary.p50 = quantile(0.5);
  summary.p90 = quantile(0.9);
  summary.p99 = quantile(0.99);
  summary.largest = factors.back();
  for (size_t i = 0; i < kImbalanceMarks.size(); ++i) {
    const auto above = std::upper_bound(factors.begin(), factors.end(), kImbalanceMarks[i]);
    summary.above_fraction[i] = static_cast<double>(factors.end() - above) / n;
  }
  return summary;
}

std::array<std::optional<double>, kAutocorrelationLags> autocorrelation(
    const std::vector<IterationImbalance>& series) {
  std::array<std::optional<double>, kAutocorrelationLags> result;
  if (series.size() < 2) return result;
  const double mean = mean_of(series, 0, series.size());
  double squares = 0;
  for (const IterationImbalance& i : series) squares += (i.factor - mean) * (i.factor - mean);
  if (squares <= 1e-12 * mean * mean) return result;
  for (int lag = 1; lag <= kAutocorrelationLags; ++lag) {
    double products = 0;
    int64_t pairs = 0;
    for (size_t i = 0, j = 0; i < series.size(); ++i) {
      const int64_t wanted = int64_t{series[i].step} + lag;
      while (j < series.size() && series[j].step < wanted) ++j;
      if (j == series.size() || series[j].step != wanted) continue;
      products += (series[i].factor - mean) * (series[j].factor - mean);
      ++pairs;
    }
    if (pairs > 0) result[static_cast<size_t>(lag - 1)] = products / squares;
  }
  return result;
}

ColdStart find_cold_start(const std::vector<IterationImbalance>& series) {
  ColdStart cold;
  const size_t count = series.size();
  if (count < 10) return cold;
  const size_t window = std::max<size_t>(1, count / 50);
  cold.settled = mean_of(series, count / 2, count);
  cold.start = mean_of(series, 0, window);
  size_t first = 0;
  while (first + window <= count && mean_of(series, first, first + window) > 1.05 * cold.settled) {
    first += window;
  }
  cold.present = cold.start > 1.1 * cold.settled && first > window;
  if (cold.present) cold.iterations = static_cast<int64_t>(std::min(first, count));
  return cold;
}

RoutingStats routing_stats(const RoutingTrace& trace, const TraceReading& reading) {
  return StatsBuilder(trace, reading).build();
}

}  // namespace bagualu
