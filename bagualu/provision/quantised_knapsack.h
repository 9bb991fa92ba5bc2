#pragma once

#include <cstdint>
#include <vector>

namespace bagualu {

/// Units: bytes that taking the item needs; worth of taking it, any unit. Neither is negative.
struct KnapsackItem {
  int64_t bytes = 0;
  int64_t worth = 0;
};

/// The items to take so that their bytes fit `capacity_bytes` and their worth is greatest, by
/// dynamic programming over memory cut into cells. A cell is the greatest common divisor of the
/// items' bytes, so the answer is exact, unless that needs more than `max_cells`; then cells are
/// larger and items are rounded up: what is taken always fits, but may be worth less.
/// Returns: 1 by item that is taken, 0 by the others. Ties go to taking the later item.
/// Requires: max_cells >= 1; a negative capacity takes nothing, not even items of 0 bytes.
/// Cost:    O(items * cells), one byte of scratch for each
std::vector<char> quantised_knapsack(const std::vector<KnapsackItem>& items, int64_t capacity_bytes,
                                     int64_t max_cells);

}  // namespace bagualu
