#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace bagualu {

/// Routed load of one rank as factors of the balanced rows: 1 = a router that spreads evenly.
struct RoutedLoads {
  double factor = 1.0;                ///< where nothing below says otherwise
  std::vector<double> by_layer = {};  ///< by layer of the model; empty: `factor`
  /// (micro-batch, factor): every MoE layer of it, in place of the two above.
  std::vector<std::pair<int64_t, double>> spikes = {};

  double at(int64_t layer, int64_t microbatch) const {
    for (const auto& [spike, spike_factor] : spikes) {
      if (spike == microbatch) return spike_factor;
    }
    return by_layer.empty() ? factor : by_layer[static_cast<size_t>(layer)];
  }
  bool operator==(const RoutedLoads&) const = default;
};

}  // namespace bagualu
