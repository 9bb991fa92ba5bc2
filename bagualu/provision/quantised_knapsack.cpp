#include "bagualu/provision/quantised_knapsack.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

int64_t cell_bytes(const std::vector<KnapsackItem>& items, int64_t capacity_bytes,
                   int64_t max_cells) {
  int64_t divisor = 0;
  for (const KnapsackItem& item : items) divisor = std::gcd(divisor, item.bytes);
  const int64_t least = (capacity_bytes + max_cells - 1) / max_cells;
  return std::max({divisor, least, int64_t{1}});
}

}  // namespace

std::vector<char> quantised_knapsack(const std::vector<KnapsackItem>& items, int64_t capacity_bytes,
                                     int64_t max_cells) {
  BGL_CHECK(max_cells >= 1, max_cells);
  std::vector<char> taken(items.size(), 0);
  if (capacity_bytes < 0) return taken;
  int64_t sum = 0;
  for (const KnapsackItem& item : items) {
    BGL_CHECK(item.bytes >= 0 && item.worth >= 0, item.bytes, item.worth);
    sum += item.bytes;
  }
  if (sum <= capacity_bytes) {  // rounding must not refuse what plainly fits
    std::fill(taken.begin(), taken.end(), char{1});
    return taken;
  }
  const int64_t cell = cell_bytes(items, capacity_bytes, max_cells);
  const auto cells = static_cast<size_t>(capacity_bytes / cell);
  const auto cells_of = [cell](const KnapsackItem& item) {
    return static_cast<size_t>((item.bytes + cell - 1) / cell);
  };
  // best[c]: greatest worth of the items so far within c cells.
  std::vector<int64_t> best(cells + 1, 0);
  std::vector<char> took(items.size() * (cells + 1), 0);
  for (size_t i = 0; i < items.size(); ++i) {
    const size_t need = cells_of(items[i]);
    for (size_t c = cells + 1; c-- > need;) {
      const int64_t with = best[c - need] + items[i].worth;
      if (with < best[c]) continue;
      best[c] = with;
      took[i * (cells + 1) + c] = 1;
    }
  }
  size_t left = cells;
  for (size_t i = items.size(); i-- > 0;) {
    if (took[i * (cells + 1) + left] == 0) continue;
    taken[i] = 1;
    left -= cells_of(items[i]);
  }
  return taken;
}

}  // namespace bagualu
