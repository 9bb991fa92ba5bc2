#include "bagualu/model/routing_split.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "bagualu/model/routing_random.h"

namespace bagualu {
namespace {

/// Neighbours in a circle: round 0 joins (0, 1), (2, 3), ...; round 1 joins (1, 2), (3, 4), ...,
/// and the last with the first where the number is even.
template <class Use>
void for_each_pair(int64_t count, int round, Use use) {
  for (int64_t i = round; i + 1 < count; i += 2) use(i, i + 1);
  if (round == 1 && count % 2 == 0 && count > 1) use(count - 1, 0);
}

/// The whole part everywhere; the units left over go round the micro-batches, where the last rank
/// stopped the next begins. Their number is a multiple of microbatches, so each gets as many.
void split_evenly(const std::vector<int64_t>& totals, int64_t microbatches, int32_t* out,
                  int64_t stride) {
  int64_t next = 0;
  for (size_t rank = 0; rank < totals.size(); ++rank) {
    const auto whole = static_cast<int32_t>(totals[rank] / microbatches);
    const int64_t rest = totals[rank] % microbatches;
    int32_t* cell = out + rank;
    for (int64_t m = 0; m < microbatches; ++m) cell[m * stride] = whole;
    for (int64_t i = 0; i < rest; ++i) {
      ++cell[next * stride];
      next = next + 1 == microbatches ? 0 : next + 1;
    }
  }
}

}  // namespace

void MicrobatchSplit::split(const std::vector<int64_t>& totals, const std::vector<int32_t>& order,
                            int64_t microbatches, int64_t largest_rows, double spread, uint64_t key,
                            int32_t* out, int64_t stride) {
  split_evenly(totals, microbatches, out, stride);
  if (spread <= 0 || microbatches < 2 || totals.size() < 2) return;
  // A cell takes part in two exchanges: each has half the variance. The hotter rank of a pair sets
  // the measure, since its rows are those that matter.
  const double unit =
      spread / std::sqrt(2.0) / static_cast<double>(microbatches) / RandomBits::kRoughSigma;
  const auto ranks = static_cast<int64_t>(order.size());
  for (int round = 0; round < 2; ++round) {
    pairs_[round].clear();
    for_each_pair(ranks, round, [&](int64_t i, int64_t j) {
      const int32_t a = order[static_cast<size_t>(i)];
      const int32_t b = order[static_cast<size_t>(j)];
      const int64_t hotter =
          std::max(totals[static_cast<size_t>(a)], totals[static_cast<size_t>(b)]);
      pairs_[round].push_back({a, b, unit * static_cast<double>(hotter)});
    });
  }
  RandomBits random(key);
  const auto largest = static_cast<int32_t>(largest_rows);
  for (int round = 0; round < 2; ++round) {
    for_each_pair(microbatches, round, [&](int64_t m, int64_t n) {
      int32_t* first = out + m * stride;
      int32_t* second = out + n * stride;
      for (const Pair& pair : pairs_[round]) {
        int32_t& a = first[pair.a];
        int32_t& b = first[pair.b];
        int32_t& c = second[pair.a];
        int32_t& d = second[pair.b];
        const int32_t most = std::min(std::min(largest - a, b), std::min(c, largest - d));
        const int32_t least = -std::min(std::min(a, largest - b), std::min(largest - c, d));
        const auto wanted = static_cast<int32_t>(random.rough_normal() * pair.per_unit);
        const int32_t rows = std::min(most, std::max(least, wanted));
        a += rows;
        b -= rows;
        c -= rows;
        d += rows;
      }
    });
  }
}

}  // namespace bagualu
