#pragma once

#include <cstdint>

#include "bagualu/sim/engine.h"

namespace bagualu {

/// Rows times members that the busiest member sends or receives, its own left out: inside its node,
/// and between nodes. What member i sends to m is rows[m] / members.
struct ExchangeShares {
  int64_t node = 0;
  int64_t network = 0;
};

/// Cost: O(members)
ExchangeShares exchange_shares(const SimLinks& links, const int32_t* rows, int64_t members);

/// One member alone exchanges nothing and takes no time.
int64_t exchange_ns(const SimLinks& links, double bytes_per_row, const ExchangeShares& shares,
                    int64_t members);

/// As long as if each member sent `bytes` in all, the same to every member, itself among them.
int64_t even_exchange_ns(const SimLinks& links, int64_t bytes, int64_t members);

/// Rounded to the nearest.
/// Throws: InternalError for bytes on a link without a speed.
int64_t transfer_ns(double bytes, double bytes_per_s);

}  // namespace bagualu
