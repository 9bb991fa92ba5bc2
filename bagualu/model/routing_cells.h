#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "bagualu/model/routing_trace.h"

namespace bagualu {

/// What a trace does not say about itself.
struct TraceReading {
  /// Rows of a rank in one micro-batch if the router spread evenly: tokens of a rank x top_k. 0:
  /// the mean over the ranks of a cell. Needed where the log has lines of some ranks only.
  int64_t balanced_rows = 0;
};

/// The records of one layer in one micro-batch.
struct RoutedCell {
  const RoutedRecord* begin = nullptr;
  const RoutedRecord* end = nullptr;
  double balanced = 0;    ///< rows of a rank if they were spread evenly; 0: the cell has no rows
  bool complete = false;  ///< has every rank that the layer usually has

  int32_t step() const { return begin->step; }
  int32_t microbatch() const { return begin->microbatch; }
  int32_t layer() const { return begin->layer; }
};

/// A trace cut into cells.
///
/// A rank belongs to a layer if it stands in at least half of the layer's cells. A cell that lacks
/// such a rank has no mean to compare with, so it is not complete and gives no factor (with
/// balanced_rows every cell does). Where micro-batches were numbered by order a lost line shifts
/// the numbers behind it, so that then no cell of that layer and step is complete.
/// Requires: the trace outlives it.
class RoutedCells {
 public:
  RoutedCells(const RoutingTrace& trace, const TraceReading& reading);

  const std::vector<RoutedCell>& cells() const { return cells_; }  ///< by step, micro-batch, layer
  /// Ranks of a layer, ascending.
  const std::map<int32_t, std::vector<int32_t>>& ranks_of_layer() const { return ranks_; }
  /// Every rank with a record, ascending.
  std::vector<int32_t> all_ranks() const;
  int64_t incomplete() const { return incomplete_; }

 private:
  void cut(const RoutingTrace& trace);
  void find_ranks(const RoutingTrace& trace);
  void judge(bool numbered_by_order, const TraceReading& reading);

  std::vector<RoutedCell> cells_;
  std::map<int32_t, std::vector<int32_t>> ranks_;
  std::vector<int32_t> all_ranks_;
  int64_t incomplete_ = 0;
};

}  // namespace bagualu
