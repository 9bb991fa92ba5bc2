#include "bagualu/base/nearest.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace bagualu {

namespace {

/// Levenshtein distance, or any number of at least `limit` once it cannot be less.
size_t bounded_distance(std::string_view a, std::string_view b, size_t limit) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    size_t least = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
      least = std::min(least, row[j]);
    }
    if (least >= limit) return least;
  }
  return row[b.size()];
}

}  // namespace

size_t edit_distance(std::string_view a, std::string_view b) {
  return bounded_distance(a, b, SIZE_MAX);
}

std::string nearest_name(std::string_view text, const std::vector<std::string>& names) {
  size_t least = SIZE_MAX;
  const std::string* nearest = nullptr;
  for (const std::string& name : names) {
    // Lengths alone keep most names away.
    const size_t longer = std::max(text.size(), name.size());
    const size_t shorter = std::min(text.size(), name.size());
    if (longer - shorter >= least) continue;
    const size_t distance = bounded_distance(text, name, least);
    if (distance >= least) continue;
    least = distance;
    nearest = &name;
  }
  return nearest == nullptr ? "" : *nearest;
}

}  // namespace bagualu
