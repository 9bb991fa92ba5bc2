// Sources that make routing up (RoutingShape).
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "bagualu/model/routing_series.h"
#include "bagualu/model/routing_source.h"

namespace bagualu {

/// In the order of routing_kinds().
enum class RoutingKind : uint8_t {
  kPaper,
  kBalanced,
  kHotExpertSet,
  kHotRank,
  kSpreadHot,
  kRaggedSource,
  kZeroLoad,
  kRotatingHotSpot,
  kBurst,
  kColdRouter,
  kFitted,
};

/// Iterations of one burst; bursts come as often as 1 - calm_fraction asks.
inline constexpr int64_t kBurstIterations = 8;

/// Excess of each layer over 1, of the hottest layer's, before the spread: such that the layers'
/// mean factors stand in the profile's ratios. Requires: mean_factor >= 1.
std::vector<double> excess_of_profile(const std::vector<double>& profile, double mean_factor,
                                      double layer_spread);

class ShapeSource : public RoutingSource {
 public:
  /// Requires: a checked shape.
  ShapeSource(const RoutingShape& shape, RoutingKind kind);

  std::string_view name() const override { return shape_.kind; }
  void rows(int64_t iteration, int64_t replica, const RoutingGroup& group,
            std::vector<int32_t>* rows) const override;

 private:
  struct Place;  ///< one replica in one iteration

  /// Of each layer, with one hot rank.
  struct HotLayers {
    std::vector<double> factor;
    std::vector<int32_t> rank;
  };

  double replica_factor(const Place& place) const;
  HotLayers hot_layers(const Place& place) const;
  void structured_factors(const Place& place, double factor, HotLayers* hot) const;
  bool in_burst(int64_t iteration) const;
  void hot_rows(const Place& place, std::vector<int32_t>* rows) const;
  void set_rows(const Place& place, std::vector<int32_t>* rows) const;
  void ragged_rows(const Place& place, std::vector<int32_t>* rows) const;

  RoutingShape shape_;
  RoutingKind kind_;
  FactorSeries series_;
  std::vector<double> excess_;
  int64_t burst_period_ = 0;  ///< 0: never
};

}  // namespace bagualu
