#pragma once

#include <cstdint>
#include <vector>

namespace bagualu {

/// A retained unit that may go over the link as a whole.
struct PackItem {
  int microbatch = 0;
  int unit = 0;
  int64_t bytes = 0;
};

/// Chooses the units that are offloaded: whole storages, at least `need_bytes` in all (a pool
/// counts bytes, a link carries tensors). Windows are filled first, each by the subset that fits
/// best (in buckets of 1/2048 of the window where taking the largest first leaves a hole); what is
/// then missing goes past them, at as few bytes as possible. `items`: those that are reloaded last
/// come first; of equal sizes the earlier one is taken. `chosen`: by item. Returns: false if all
/// items together are too few.
bool pack_offloads(const std::vector<PackItem>& items, const std::vector<int64_t>& window_bytes,
                   int64_t need_bytes, std::vector<uint8_t>& chosen);

}  // namespace bagualu
