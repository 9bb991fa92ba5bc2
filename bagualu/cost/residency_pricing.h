#pragma once

#include <cstdint>

namespace bagualu {

/// Price of moving bytes over a path that this machine lacks (rate 0): 11 days, so that no plan
/// takes it while anything else fits, and sums over many units still fit int64.
inline constexpr int64_t kUnpricedNs = 1'000'000'000'000'000;

/// Time of moving `bytes` at `bytes_per_s`; 0 for no bytes, kUnpricedNs for a rate that is not > 0.
/// Requires: bytes >= 0.
constexpr int64_t transfer_ns(int64_t bytes, double bytes_per_s) {
  if (bytes == 0) return 0;
  if (!(bytes_per_s > 0)) return kUnpricedNs;
  const double ns = static_cast<double>(bytes) * 1e9 / bytes_per_s;
  return ns < static_cast<double>(kUnpricedNs) ? static_cast<int64_t>(ns) : kUnpricedNs;
}

}  // namespace bagualu
