#include "bagualu/model/routing_loads.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
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

/// visit(first, last) for the cells of every step.
template <class Visit>
void for_each_step(const RoutedCells& split, Visit visit) {
  const RoutedCell* end = split.cells().data() + split.cells().size();
  for (const RoutedCell* first = split.cells().data(); first != end;) {
    const RoutedCell* next = first;
    while (next != end && next->step() == first->step()) ++next;
    visit(first, next);
    first = next;
  }
}

template <class RankOf>
std::vector<RankLoads> loads_by_step(const RoutingTrace& trace, const TraceReading& reading,
                                     RankOf rank_of) {
  const RoutedCells split(trace, reading);
  std::vector<RankLoads> result;
  for_each_step(split, [&](const RoutedCell* first, const RoutedCell* last) {
    RankLoads loads = step_loads(first, last, rank_of(first, last));
    if (!loads.layers.empty()) result.push_back(std::move(loads));
  });
  return result;
}

/// Layers on the same ranks: the trace's number -> the model's.
struct Stage {
  std::map<int32_t, int64_t> numbers;
};

std::vector<Stage> stages_of(const RoutedCells& split, const RoutingTrace& trace,
                             const ModelSpec& model, const std::string& where) {
  std::vector<Stage> result;
  if (split.cells().empty()) return result;
  std::vector<int64_t> moe;
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    if (model.is_moe(layer)) moe.push_back(layer);
  }
  // Some write the model's numbers with counts per expert too; then they go past the places.
  const bool places = trace.moe_layers_only &&
                      split.ranks_of_layer().rbegin()->first < static_cast<int64_t>(moe.size());
  std::map<std::vector<int32_t>, Stage> stages;
  for (const auto& [number, ranks] : split.ranks_of_layer()) {
    int64_t layer = number - trace.first_layer;
    if (places) layer = moe[static_cast<size_t>(number)];
    if (!std::binary_search(moe.begin(), moe.end(), layer)) {
      throw InvalidInput(where, "layer", std::to_string(number),
                         fmt::format("one of the {} layers with experts of {}, counted from {}",
                                     moe.size(), model.name, trace.first_layer));
    }
    stages[ranks].numbers[number] = layer;
  }
  for (auto& [ranks, stage] : stages) result.push_back(std::move(stage));
  return result;
}

std::vector<std::vector<double>> calm_detail(size_t microbatches, int64_t layers) {
  return {microbatches, std::vector<double>(static_cast<size_t>(layers), 1.0)};
}

/// Micro-batches go by their place: a trace may number them from 1 or have gaps.
void copy_factors(const RankLoads& loads, const std::map<int32_t, int64_t>& numbers,
                  std::vector<std::vector<double>>* detail) {
  for (size_t layer = 0; layer < loads.layers.size(); ++layer) {
    const auto number = numbers.find(loads.layers[layer]);
    if (number == numbers.end() || number->second < 0) continue;
    const auto place = static_cast<size_t>(number->second);
    for (size_t m = 0; m < loads.microbatches.size(); ++m) {
      if (place < (*detail)[m].size()) (*detail)[m][place] = loads.at(m, layer);
    }
  }
}

RoutedLoads with_means(std::vector<std::vector<double>> detail) {
  RoutedLoads loads;
  if (detail.empty()) return loads;
  const size_t layers = detail.front().size();
  loads.by_layer.assign(layers, 0.0);
  for (size_t m = 0; m < detail.size(); ++m) {
    double sum = 0;
    for (size_t layer = 0; layer < layers; ++layer) {
      sum += detail[m][layer];
      loads.by_layer[layer] += detail[m][layer] / static_cast<double>(detail.size());
    }
    loads.spikes.emplace_back(static_cast<int64_t>(m), sum / static_cast<double>(layers));
  }
  loads.by_microbatch = std::move(detail);
  return loads;
}

}  // namespace

std::vector<RankLoads> rank_loads(const RoutingTrace& trace, int32_t rank,
                                  const TraceReading& reading) {
  return loads_by_step(trace, reading, [&](const RoutedCell*, const RoutedCell*) { return rank; });
}

std::vector<RankLoads> hottest_rank_loads(const RoutingTrace& trace, const TraceReading& reading) {
  return loads_by_step(trace, reading, hottest_rank);
}

RoutedLoads routed_loads(const RankLoads& loads, int64_t layers, int64_t first_layer) {
  BGL_CHECK(layers >= 1, layers);
  std::map<int32_t, int64_t> numbers;
  for (const int32_t layer : loads.layers) numbers[layer] = layer - first_layer;
  std::vector<std::vector<double>> detail = calm_detail(loads.microbatches.size(), layers);
  copy_factors(loads, numbers, &detail);
  return with_means(std::move(detail));
}

std::vector<RoutedLoads> iteration_loads(const RoutingTrace& trace, const ModelSpec& model,
                                         const std::string& where, const TraceReading& reading) {
  const RoutedCells split(trace, reading);
  const std::vector<Stage> stages = stages_of(split, trace, model, where);
  std::vector<RoutedLoads> result;
  for_each_step(split, [&](const RoutedCell* first, const RoutedCell* last) {
    std::vector<std::vector<double>> detail;
    for (const Stage& stage : stages) {
      std::vector<RoutedCell> cells;
      std::copy_if(first, last, std::back_inserter(cells),
                   [&](const RoutedCell& cell) { return stage.numbers.count(cell.layer()) > 0; });
      if (cells.empty()) continue;
      const RoutedCell* end = cells.data() + cells.size();
      const RankLoads loads = step_loads(cells.data(), end, hottest_rank(cells.data(), end));
      const size_t microbatches = std::max(detail.size(), loads.microbatches.size());
      detail.resize(microbatches, std::vector<double>(static_cast<size_t>(model.layers), 1.0));
      copy_factors(loads, stage.numbers, &detail);
    }
    if (!detail.empty()) result.push_back(with_means(std::move(detail)));
  });
  return result;
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
