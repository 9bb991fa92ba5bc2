// Inner loops of the engine over the members that share a program. Lanes come in fours; the last
// member's stand in for those that a class lacks, so that largest values are not disturbed.
#pragma once

#include <cstdint>

#include "bagualu/sim/step_code.h"

namespace bagualu {

/// Lanes are a multiple of this.
inline constexpr int kLaneBlock = 4;

/// Requires: lanes > 0, a multiple of kLaneBlock; rows at least 0.
struct LaneMath {
  /// clock += before_ns, then every time of `times` at the lane's rows, each rounded on its own as
  /// OpTime::eval() does.
  void (*add_rows)(int64_t* clock, const int32_t* rows, int lanes, int64_t before_ns,
                   const RowTime* times, int count, const RowPiece* pieces);
  /// clock += before_ns; then at least end_ns, and what that took is added to `wait`.
  void (*await_one)(int64_t* clock, int64_t* wait, int lanes, int64_t before_ns, int64_t end_ns);
  /// The same with an end for every lane.
  void (*await_each)(int64_t* clock, int64_t* wait, int lanes, int64_t before_ns,
                     const int64_t* end_ns);
  /// Largest clock.
  int64_t (*latest)(const int64_t* clock, int lanes);
  /// A copy issued at clock + before_ns on a stream that is free at `free`: it moves bytes +
  /// bytes_per_row * rows at bytes_per_s. Ends are written to `free`, and to `end` if there is one.
  void (*copy)(const int64_t* clock, int64_t before_ns, int64_t* free, int64_t* busy, int64_t* end,
               const int32_t* rows, int lanes, const SimTransfer& transfer, double bytes_per_s);
  void (*memory)(int64_t* own, int64_t* peak, const int32_t* rows, const int32_t* piece_rows,
                 int lanes, const MemoryOp& op, const RoundedBytes* rounded);
};

/// For this processor. The results are the same on all.
const LaneMath& lane_math();

}  // namespace bagualu
