#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace bagualu {

/// Mean of measured times without the longest `tail` of them (a fraction, rounded down to whole
/// values). Where times are added up a mean is right and a median is not: a part that takes long now
/// and then does so in every sum of many parts. What is left out are pauses that are nobody's.
/// Requires: not empty, 0 <= tail < 1.
inline int64_t mean_without_tail(std::vector<int64_t> values, double tail) {
  const auto left_out = static_cast<size_t>(static_cast<double>(values.size()) * tail);
  const auto kept = static_cast<std::ptrdiff_t>(values.size() - left_out);
  if (left_out > 0) std::nth_element(values.begin(), values.begin() + kept, values.end());
  return std::accumulate(values.begin(), values.begin() + kept, int64_t{0}) / kept;
}

}  // namespace bagualu
