#include "bagualu/sim/exchange_time.h"

#include <algorithm>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

int64_t node_of(const SimLinks& links, int64_t member) {
  return (links.first_member_in_node + member * links.ranks_between) / links.node_size;
}

}  // namespace

int64_t transfer_ns(double bytes, double bytes_per_s) {
  if (bytes == 0) return 0;
  BGL_CHECK(bytes_per_s > 0, "bytes on a link without a speed", bytes);
  return static_cast<int64_t>(bytes * 1e9 / bytes_per_s + 0.5);
}

ExchangeShares exchange_shares(const SimLinks& links, const int32_t* rows, int64_t members) {
  BGL_CHECK(links.node_size > 0 && members > 0, links.node_size, members);
  int64_t all = 0;
  for (int64_t m = 0; m < members; ++m) all += rows[m];
  ExchangeShares shares;
  for (int64_t begin = 0, end = 0; begin < members; begin = end) {
    int64_t here = 0, least = rows[begin], most = rows[begin];
    for (end = begin; end < members && node_of(links, end) == node_of(links, begin); ++end) {
      here += rows[end];
      least = std::min<int64_t>(least, rows[end]);
      most = std::max<int64_t>(most, rows[end]);
    }
    const int64_t inside = end - begin;
    // Who receives least keeps least for itself, so it sends most to its node.
    shares.node = std::max({shares.node, here - least, (inside - 1) * most});
    shares.network = std::max({shares.network, all - here, (members - inside) * most});
  }
  return shares;
}

int64_t exchange_ns(const SimLinks& links, double bytes_per_row, const ExchangeShares& shares,
                    int64_t members) {
  if (members == 1) return 0;
  const double each = bytes_per_row / static_cast<double>(members);
  return links.latency_ns +
         std::max(
             transfer_ns(each * static_cast<double>(shares.node), links.node_bytes_per_s),
             transfer_ns(each * static_cast<double>(shares.network), links.network_bytes_per_s));
}

int64_t even_exchange_ns(const SimLinks& links, int64_t bytes, int64_t members) {
  int64_t most = 0, least = members;
  for (int64_t begin = 0, end = 0; begin < members; begin = end) {
    for (end = begin; end < members && node_of(links, end) == node_of(links, begin); ++end) {
    }
    most = std::max(most, end - begin);
    least = std::min(least, end - begin);
  }
  return exchange_ns(links, static_cast<double>(bytes), {most - 1, members - least}, members);
}

int64_t exchange_ns(const SimLinks& links, int64_t bytes_per_row, const int32_t* rows,
                    int64_t members) {
  return exchange_ns(links, static_cast<double>(bytes_per_row),
                     exchange_shares(links, rows, members), members);
}

}  // namespace bagualu
