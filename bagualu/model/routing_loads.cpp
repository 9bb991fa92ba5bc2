#include "bagualu/model/routing_loads.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr double kUnknown = -1;

const RoutedRecord* record_of(const RoutedCell& cell, int32_t rank) {
  const RoutedRecord* found = std::lower_bound(
      cell.begin, cell.end, rank, [](const RoutedRecord& r, int32_t n) { return r.rank < n; });
  return found != cell.end && found->rank == rank ? found : nullptr;
}

template <class Map>
size_t place_in(const Map& sorted, int32_t value) {
  return static_cast<size_t>(std::lower_bound(sorted.begin(), sorted.end(), value) -
                             sorted.begin());
}

void fill_unknown(RankLoads* loads) {
  for (size_t layer = 0; layer < loads->layers.size(); ++layer) {
    double sum = 0;
    int64_t known = 0;
    for (size_t m = 0; m < loads->microbatches.size(); ++m) {
      if (loads->at(m, layer) == kUnknown) continue;
      sum += loads->at(m, layer);
      ++known;
    }
    const double mean = known == 0 ? 1.0 : sum / static_cast<double>(known);
    for (size_t m = 0; m < loads->microbatches.size(); ++m) {
      double& factor = loads->factors[m * loads->layers.size() + layer];
      if (factor == kUnknown) factor = mean;
    }
  }
}

/// Loads of a rank in the cells [first, last) of one step; no layers if it has none there.
RankLoads step_loads(const RoutedCell* first, const RoutedCell* last, int32_t rank) {
  RankLoads loads;
  loads.step = first->step();
  loads.rank = rank;
  std::set<int32_t> layers;
  for (const RoutedCell* cell = first; cell != last; ++cell) {
    if (loads.microbatches.empty() || loads.microbatches.back() != cell->microbatch()) {
      loads.microbatches.push_back(cell->microbatch());
    }
    if (record_of(*cell, rank) != nullptr) layers.insert(cell->layer());
  }
  loads.layers.assign(layers.begin(), layers.end());
  loads.factors.assign(loads.layers.size() * loads.microbatches.size(), kUnknown);
  for (const RoutedCell* cell = first; cell != last; ++cell) {
    const RoutedRecord* record = record_of(*cell, rank);
    if (record == nullptr || !cell->complete || cell->balanced <= 0) continue;
    const size_t m = place_in(loads.microbatches, cell->microbatch());
    const size_t layer = place_in(loads.layers, cell->layer());
    loads.factors[m * loads.layers.size() + layer] =
        static_cast<double>(record->tokens) / cell->balanced;
  }
  fill_unknown(&loads);
  return loads;
}

int32_t hottest_rank(const RoutedCell* first, const RoutedCell* last) {
  struct Sum {
    double factors = 0;
    int64_t count = 0;
  };
  std::map<int32_t, Sum> ranks;
  for (const RoutedCell* cell = first; cell != last; ++cell) {
    if (!cell->complete || cell->balanced <= 0) continue;
    for (const RoutedRecord* r = cell->begin; r != cell->end; ++r) {
      ranks[r->rank].factors += static_cast<double>(r->tokens) / cell->balanced;
      ++ranks[r->rank].count;
    }
  }
  int32_t hottest = first->begin->rank;
  double most = -1;
  for (const auto& [rank, sum] : ranks) {
    const double mean = sum.factors / static_cast<double>(sum.count);
    if (mean > most) {
      most = mean;
      hottest = rank;
    }
  }
  return hottest;
}

template <class RankOf>
std::vector<RankLoads> loads_by_step(const RoutingTrace& trace, const TraceReading& reading,
                                     RankOf rank_of) {
  const RoutedCells split(trace, reading);
  std::vector<RankLoads> result;
  const RoutedCell* end = split.cells().data() + split.cells().size();
  for (const RoutedCell* first = split.cells().data(); first != end;) {
    const RoutedCell* next = first;
    while (next != end && next->step() == first->step()) ++next;
    RankLoads loads = step_loads(first, next, rank_of(first, next));
    if (!loads.layers.empty()) result.push_back(std::move(loads));
    first = next;
  }
  return result;
}

}  // namespace

std::vector<RankLoads> rank_loads(const RoutingTrace& trace, int32_t rank,
                                  const TraceReading& reading) {
  return loads_by_step(trace, reading, [&](const RoutedCell*, const RoutedCell*) { return rank; });
}

std::vector<RankLoads> hottest_rank_loads(const RoutingTrace& trace, const TraceReading& reading) {
  return loads_by_step(trace, reading, hottest_rank);
}

RoutedLoads routed_loads(const RankLoads& loads, int64_t layers, int64_t first_layer,
                         LoadDetail detail) {
  BGL_CHECK(layers >= 1, layers);
  RoutedLoads routed;
  routed.by_layer.assign(static_cast<size_t>(layers), 1.0);
  const size_t microbatches = loads.microbatches.size();
  for (size_t layer = 0; layer < loads.layers.size(); ++layer) {
    double sum = 0;
    for (size_t m = 0; m < microbatches; ++m) sum += loads.at(m, layer);
    const int64_t number = loads.layers[layer] - first_layer;
    if (number < 0 || number >= layers || microbatches == 0) continue;
    routed.by_layer[static_cast<size_t>(number)] = sum / static_cast<double>(microbatches);
  }
  if (detail == LoadDetail::kByLayer || microbatches < 2 || loads.layers.empty()) return routed;
  for (size_t m = 0; m < microbatches; ++m) {
    double sum = 0;
    for (size_t layer = 0; layer < loads.layers.size(); ++layer) sum += loads.at(m, layer);
    // By place, not by number: a trace may number from 1, and has gaps where lines were lost.
    routed.spikes.emplace_back(static_cast<int64_t>(m),
                               sum / static_cast<double>(loads.layers.size()));
  }
  return routed;
}

RoutedLoads cold_router(int64_t iteration, const ColdRouter& router, double largest) {
  BGL_CHECK(iteration >= 0, iteration);
  const double share = iteration < router.iterations
                           ? std::exp2(-static_cast<double>(iteration) / router.half_life)
                           : 0.0;
  RoutedLoads loads;
  loads.factor = router.calm + (router.start - router.calm) * share;
  if (largest > 0) loads.factor = std::min(loads.factor, largest);
  return loads;
}

}  // namespace bagualu
