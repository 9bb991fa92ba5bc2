#pragma once

#include <cstdint>
#include <vector>

namespace bagualu {

/// Storages that cannot be rebuilt: kept (whole or encoded) or offloaded.
struct StubbornItem {
  int microbatch = 0;
  int unit = 0;
  int64_t bytes = 0;
  int64_t kept_bytes = 0;  ///< least it holds on the device if it is not offloaded
};

struct LeastDevice {
  int64_t bytes = 0;               ///< kept by the items
  bool proven = false;             ///< nothing less is possible
  std::vector<uint8_t> offloaded;  ///< by item
};

/// Least device bytes of these items if each link takes whole tensors up to `link_bytes` (by
/// micro-batch) and all of them together up to `host_bytes`. Depth first, largest first, bounded.
/// Used to say how many bytes are missing, and for a plan that surely fits if any does.
LeastDevice least_device(const std::vector<StubbornItem>& items, std::vector<int64_t> link_bytes,
                         int64_t host_bytes);

}  // namespace bagualu
