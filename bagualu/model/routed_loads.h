#pragma once

#include <cstddef>
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

  /// [micro-batches][layers of the model], in place of all above; micro-batches past the end wrap
  /// round. Whoever fills it fills `by_layer` and `spikes` with its means too, for those who want
  /// one number.
  std::vector<std::vector<double>> by_microbatch = {};

  double at(int64_t layer, int64_t microbatch) const {
    if (!by_microbatch.empty()) {
      const size_t row = static_cast<size_t>(microbatch) % by_microbatch.size();
      return by_microbatch[row][static_cast<size_t>(layer)];
    }
    for (const auto& [spike, spike_factor] : spikes) {
      if (spike == microbatch) return spike_factor;
    }
    return by_layer.empty() ? factor : by_layer[static_cast<size_t>(layer)];
  }
  bool operator==(const RoutedLoads&) const = default;
};

}  // namespace bagualu
