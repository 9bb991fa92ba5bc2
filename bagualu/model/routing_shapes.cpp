#include "bagualu/model/routing_shapes.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/model/routing_loads.h"
#include "bagualu/model/routing_random.h"
#include "bagualu/model/routing_split.h"

namespace bagualu {
namespace {

/// What a random number is for.
enum Purpose : uint64_t {
  kReplicaOfIteration = 2,
  kFactorOfReplica,
  kLayerSpread,
  kRankOfIteration,
  kRankOfReplica,
  kRankOfBurst,
  kOrder,
  kOtherRanks,
  kSplit,
  kRagged,
  kProfile,
};

/// The ranks beside the hot one keep within this share of the mean.
constexpr double kOtherSpread = 0.05;

/// Half of the calm iterations lie below the middle between 1 and the limit, none below a quarter;
/// above the limit all factors up to the largest are equally likely. The paper gives the share and
/// the two limits; the lines between them are ours.
QuantilePoints paper_points(const RoutingShape& shape) {
  const double excess = shape.calm_limit - 1;
  QuantilePoints points;
  if (shape.calm_fraction > 0) {
    points.fraction = {0, shape.calm_fraction / 2};
    points.value = {1 + excess / 4, 1 + excess / 2};
  }
  points.fraction.push_back(shape.calm_fraction);
  points.value.push_back(shape.calm_limit);
  if (shape.calm_fraction < 1) {
    points.fraction.push_back(1);
    points.value.push_back(shape.largest);
  }
  return points;
}

QuantilePoints points_of(const RoutingShape& shape, RoutingKind kind) {
  if (kind != RoutingKind::kFitted) return paper_points(shape);
  QuantilePoints points;
  points.value = shape.quantiles;
  if (points.value.size() == 1) points.value.assign(2, shape.quantiles.front());
  for (size_t i = 0; i < points.value.size(); ++i) {
    points.fraction.push_back(static_cast<double>(i) /
                              static_cast<double>(points.value.size() - 1));
  }
  return points;
}

void shuffle(RandomBits* random, std::vector<int32_t>* order) {
  std::iota(order->begin(), order->end(), 0);
  for (size_t i = order->size(); i > 1; --i) {
    std::swap((*order)[i - 1],
              (*order)[static_cast<size_t>(random->below(static_cast<int64_t>(i)))]);
  }
}

/// `rows` over the ranks [first, last) of order, as evenly as whole rows can be.
void share_evenly(int64_t rows, const int32_t* first, const int32_t* last,
                  std::vector<int64_t>* totals) {
  const int64_t count = last - first;
  for (int64_t i = 0; i < count; ++i) {
    (*totals)[static_cast<size_t>(first[i])] = rows / count + (i < rows % count ? 1 : 0);
  }
}

/// Rows of a hot rank in an iteration; a millionth of a row is lost to rounding of the factor.
int64_t rows_at(double factor, int64_t mean, int64_t largest) {
  const auto rows = static_cast<int64_t>(factor * static_cast<double>(mean) + 1e-6);
  return std::clamp(rows, mean, std::max(mean, largest));
}

}  // namespace

std::vector<double> excess_of_profile(const std::vector<double>& profile, double mean_factor,
                                      double layer_spread) {
  const double mean = mean_factor - 1;
  std::vector<double> excess(profile.size(), 1.0);
  if (profile.empty() || mean <= 1e-9) return excess;
  const size_t hottest =
      static_cast<size_t>(std::max_element(profile.begin(), profile.end()) - profile.begin());
  constexpr int kRounds = 8;
  constexpr int kDraws = 256;
  std::vector<double> raw(profile.size());
  for (int round = 0; round < kRounds; ++round) {
    RandomBits random(random_key({kProfile}));
    std::vector<double> sums(profile.size());
    for (int draw = 0; draw < kDraws; ++draw) {
      double most = 0;
      for (size_t i = 0; i < raw.size(); ++i) {
        raw[i] = excess[i] * (1 - layer_spread * random.uniform());
        most = std::max(most, raw[i]);
      }
      for (size_t i = 0; i < raw.size(); ++i) sums[i] += raw[i] / most / kDraws;
    }
    const double of_hottest = 1 + mean * sums[hottest];
    for (size_t i = 0; i < raw.size(); ++i) {
      const double wanted = std::max(0.0, (profile[i] / profile[hottest] * of_hottest - 1) / mean);
      if (sums[i] > 0) excess[i] = std::min(1.0, excess[i] * wanted / sums[i]);
    }
    excess[hottest] = 1;
  }
  return excess;
}

struct ShapeSource::Place {
  int64_t iteration = 0;
  int64_t replica = 0;
  const RoutingGroup& group;
  uint64_t seed = 0;

  uint64_t key(uint64_t purpose, int64_t part = 0) const {
    return random_key({seed, purpose, static_cast<uint64_t>(iteration),
                       static_cast<uint64_t>(replica), static_cast<uint64_t>(part)});
  }
  /// The same in every iteration.
  uint64_t lasting_key(uint64_t purpose, int64_t part = 0) const {
    return random_key({seed, purpose, static_cast<uint64_t>(replica), static_cast<uint64_t>(part)});
  }
  int64_t mean() const { return group.balanced_rows * group.microbatches; }
  /// Of a rank in the iteration.
  int64_t largest() const {
    return std::min(group.largest_rows * group.microbatches, group.ranks * mean());
  }
};

ShapeSource::ShapeSource(const RoutingShape& shape, RoutingKind kind)
    : shape_(shape),
      kind_(kind),
      series_(points_of(shape, kind), shape.autocorrelation, shape.seed),
      excess_(excess_of_profile(shape.layer_profile, series_.mean(), shape.layer_spread)) {
  if (kind == RoutingKind::kBurst && shape.calm_fraction < 1) {
    burst_period_ = static_cast<int64_t>(std::clamp(
        kBurstIterations / (1 - shape.calm_fraction) + 0.5, 1.0 * kBurstIterations, 1e12));
  }
}

void ShapeSource::rows(int64_t iteration, int64_t replica, const RoutingGroup& group,
                       std::vector<int32_t>* rows) const {
  BGL_CHECK(group.ranks >= 1 && group.layers >= 0 && group.microbatches >= 1, group.ranks);
  BGL_CHECK(group.balanced_rows >= 0 && group.largest_rows >= group.balanced_rows,
            group.balanced_rows, group.largest_rows);
  BGL_CHECK(group.largest_rows <= INT32_MAX, group.largest_rows);
  const Place place{iteration, replica, group, shape_.seed};
  rows->resize(static_cast<size_t>(group.microbatches * group.layers * group.ranks));
  if (kind_ == RoutingKind::kBalanced || group.ranks == 1) {
    std::fill(rows->begin(), rows->end(), static_cast<int32_t>(group.balanced_rows));
  } else if (kind_ == RoutingKind::kRaggedSource) {
    ragged_rows(place, rows);
  } else if (kind_ == RoutingKind::kHotExpertSet || kind_ == RoutingKind::kZeroLoad) {
    set_rows(place, rows);
  } else {
    hot_rows(place, rows);
  }
}

double ShapeSource::replica_factor(const Place& place) const {
  if (kind_ == RoutingKind::kBurst) {
    // Outside of bursts every iteration is calm.
    const double u = RandomBits(place.key(kFactorOfReplica)).uniform();
    return 1 + (shape_.calm_limit - 1) * (0.25 + 0.75 * u);
  }
  const int64_t replicas = std::max<int64_t>(1, place.group.replicas);
  RandomBits which(
      random_key({shape_.seed, kReplicaOfIteration, static_cast<uint64_t>(place.iteration)}));
  if (replicas == 1 || which.below(replicas) == place.replica) {
    return series_.factor(place.iteration);
  }
  const double u = RandomBits(place.key(kFactorOfReplica)).uniform();
  return series_.below(place.iteration, u, replicas);
}

void ShapeSource::structured_factors(const Place& place, double factor, HotLayers* hot) const {
  RandomBits spread(place.key(kLayerSpread));
  const size_t layers = hot->factor.size();
  double most = 0;
  for (size_t layer = 0; layer < layers; ++layer) {
    const double u = spread.uniform();
    const double excess = excess_.empty() ? 1.0 : excess_[layer * excess_.size() / layers];
    hot->factor[layer] = excess * (1 - shape_.layer_spread * u);
    most = std::max(most, hot->factor[layer]);
  }
  RandomBits ranks(place.key(kRankOfIteration));
  const int64_t common = ranks.below(place.group.ranks);
  for (size_t layer = 0; layer < layers; ++layer) {
    const double share = most > 0 ? hot->factor[layer] / most : 1;
    hot->factor[layer] = 1 + (factor - 1) * share;
    const bool agrees = ranks.uniform() < shape_.rank_agreement;
    const int64_t own = ranks.below(place.group.ranks);
    hot->rank[layer] = static_cast<int32_t>(agrees ? common : own);
  }
}

bool ShapeSource::in_burst(int64_t iteration) const {
  return burst_period_ > 0 && iteration % burst_period_ >= burst_period_ - kBurstIterations;
}

ShapeSource::HotLayers ShapeSource::hot_layers(const Place& place) const {
  const auto layers = static_cast<size_t>(place.group.layers);
  const int64_t ranks = place.group.ranks;
  HotLayers hot{std::vector<double>(layers, shape_.largest), std::vector<int32_t>(layers)};
  const auto lasting = [&](int64_t layer) {
    return RandomBits(place.lasting_key(kRankOfReplica, layer)).below(ranks);
  };
  const auto everywhere = [&](int64_t rank) {
    std::fill(hot.rank.begin(), hot.rank.end(), static_cast<int32_t>(rank));
  };
  if (kind_ == RoutingKind::kHotRank) {
    everywhere(lasting(0));
  } else if (kind_ == RoutingKind::kSpreadHot) {
    for (size_t layer = 0; layer < layers; ++layer) {
      hot.rank[layer] = static_cast<int32_t>(lasting(static_cast<int64_t>(layer)));
    }
  } else if (kind_ == RoutingKind::kRotatingHotSpot) {
    everywhere((lasting(0) + place.iteration) % ranks);
  } else if (kind_ == RoutingKind::kColdRouter) {
    ColdRouter router;
    router.calm = shape_.calm_limit;
    router.start = std::max(router.start, router.calm);
    std::fill(hot.factor.begin(), hot.factor.end(), cold_router(place.iteration, router).factor);
    everywhere(lasting(0));
  } else if (kind_ == RoutingKind::kBurst && in_burst(place.iteration)) {
    const int64_t burst = place.iteration / burst_period_;
    everywhere(RandomBits(place.lasting_key(kRankOfBurst, burst)).below(ranks));
  } else {
    structured_factors(place, replica_factor(place), &hot);
  }
  return hot;
}

void ShapeSource::hot_rows(const Place& place, std::vector<int32_t>* rows) const {
  const RoutingGroup& group = place.group;
  const HotLayers hot = hot_layers(place);
  const int64_t mean = place.mean();
  std::vector<int64_t> totals(static_cast<size_t>(group.ranks));
  std::vector<int32_t> order(totals.size());
  MicrobatchSplit split;
  for (int64_t layer = 0; layer < group.layers; ++layer) {
    const auto at = static_cast<size_t>(layer);
    RandomBits random(place.key(kOrder, layer));
    shuffle(&random, &order);
    std::swap(*std::find(order.begin(), order.end(), hot.rank[at]), order[0]);
    const int64_t most = rows_at(hot.factor[at], mean, place.largest());
    totals[static_cast<size_t>(order[0])] = most;
    share_evenly(group.ranks * mean - most, order.data() + 1, order.data() + order.size(), &totals);
    for (size_t i = 1; i + 1 < order.size(); i += 2) {
      int64_t& a = totals[static_cast<size_t>(order[i])];
      int64_t& b = totals[static_cast<size_t>(order[i + 1])];
      const auto spread = static_cast<int64_t>(kOtherSpread * static_cast<double>(mean));
      const int64_t reach = std::min({spread, most - a, most - b, a, b});
      const int64_t moved = random.below(2 * reach + 1) - reach;
      a += moved;
      b -= moved;
    }
    split.split(totals, order, group.microbatches, group.largest_rows, shape_.microbatch_spread,
                place.key(kSplit, layer), rows->data() + layer * group.ranks,
                group.layers * group.ranks);
  }
}

/// A quarter of the ranks, at least one, the same ones for good: hot or without rows.
void ShapeSource::set_rows(const Place& place, std::vector<int32_t>* rows) const {
  const RoutingGroup& group = place.group;
  const int64_t mean = place.mean();
  const int64_t in_set = std::max<int64_t>(1, group.ranks / 4);
  const int64_t others = group.ranks - in_set;
  const int64_t all = group.ranks * mean;
  std::vector<int64_t> totals(static_cast<size_t>(group.ranks));
  std::vector<int32_t> order(totals.size());
  RandomBits random(place.lasting_key(kOrder));
  shuffle(&random, &order);
  // What the others cannot take stays with the ranks that should have had nothing.
  const int64_t of_set =
      kind_ == RoutingKind::kZeroLoad
          ? std::max<int64_t>(0, all - others * place.largest())
          : in_set * rows_at(shape_.largest, mean, std::min(place.largest(), all / in_set));
  share_evenly(of_set, order.data(), order.data() + in_set, &totals);
  share_evenly(all - of_set, order.data() + in_set, order.data() + order.size(), &totals);
  MicrobatchSplit split;
  for (int64_t layer = 0; layer < group.layers; ++layer) {
    split.split(totals, order, group.microbatches, group.largest_rows, shape_.microbatch_spread,
                place.key(kSplit, layer), rows->data() + layer * group.ranks,
                group.layers * group.ranks);
  }
}

/// In every micro-batch and layer a straight line from few rows to many over the ranks, in another
/// order each time: uneven in every micro-batch, nearly even over the iteration.
void ShapeSource::ragged_rows(const Place& place, std::vector<int32_t>* rows) const {
  const RoutingGroup& group = place.group;
  const double top = std::min(2.0, shape_.largest);
  const auto reach =
      std::min(static_cast<int64_t>((top - 1) * static_cast<double>(group.balanced_rows)),
               group.largest_rows - group.balanced_rows);
  std::vector<int32_t> line(static_cast<size_t>(group.ranks));
  for (int64_t i = 0; i < group.ranks / 2; ++i) {
    const int64_t off = reach * (group.ranks - 1 - 2 * i) / (group.ranks - 1);
    line[static_cast<size_t>(i)] = static_cast<int32_t>(group.balanced_rows - off);
    line[static_cast<size_t>(group.ranks - 1 - i)] =
        static_cast<int32_t>(group.balanced_rows + off);
  }
  if (group.ranks % 2 == 1) {
    line[static_cast<size_t>(group.ranks / 2)] = static_cast<int32_t>(group.balanced_rows);
  }
  std::vector<int32_t> order(line.size());
  RandomBits random(place.key(kRagged));
  int32_t* cell = rows->data();
  for (int64_t i = 0; i < group.microbatches * group.layers; ++i, cell += group.ranks) {
    shuffle(&random, &order);
    for (size_t rank = 0; rank < line.size(); ++rank) {
      cell[rank] = line[static_cast<size_t>(order[rank])];
    }
  }
}

}  // namespace bagualu
