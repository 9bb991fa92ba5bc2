#pragma once

#include <cstdint>
#include <vector>

namespace bagualu {

/// Rows of one layer by micro-batch and rank, of the rows that every rank receives in the whole
/// iteration. Both sums are kept exactly: of a rank over the micro-batches, and of a micro-batch
/// over the ranks. The spread is made of exchanges: two ranks swap rows in one micro-batch and back
/// in another, so neither sum moves.
class MicrobatchSplit {
 public:
  /// out[microbatch * stride + rank] becomes the rows, each 0 to largest_rows.
  /// order:    the ranks in the order in which neighbours exchange
  /// spread:   relative standard deviation of a rank's rows in a micro-batch
  /// Requires: the totals add up to ranks * balanced_rows * microbatches, each 0 to largest_rows *
  ///           microbatches; order is a permutation of the ranks.
  void split(const std::vector<int64_t>& totals, const std::vector<int32_t>& order,
             int64_t microbatches, int64_t largest_rows, double spread, uint64_t key, int32_t* out,
             int64_t stride);

 private:
  struct Pair {
    int32_t a = 0;
    int32_t b = 0;
    double per_unit = 0;  ///< rows of one unit of RandomBits::rough_normal()
  };

  std::vector<Pair> pairs_[2];
};

}  // namespace bagualu
