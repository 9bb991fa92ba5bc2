#include "bagualu/model/routing_cells.h"

#include <algorithm>
#include <set>
#include <utility>

namespace bagualu {

RoutedCells::RoutedCells(const RoutingTrace& trace, const TraceReading& reading) {
  cut(trace);
  find_ranks(trace);
  judge(trace.numbered_by_order, reading);
}

std::vector<int32_t> RoutedCells::all_ranks() const { return all_ranks_; }

void RoutedCells::cut(const RoutingTrace& trace) {
  const RoutedRecord* record = trace.records.data();
  const RoutedRecord* end = record + trace.records.size();
  while (record != end) {
    const RoutedRecord* next = record;
    while (next != end && next->step == record->step && next->microbatch == record->microbatch &&
           next->layer == record->layer) {
      ++next;
    }
    cells_.push_back({record, next});
    record = next;
  }
}

void RoutedCells::find_ranks(const RoutingTrace& trace) {
  struct Seen {
    int64_t cells = 0;
    std::map<int32_t, int64_t> by_rank;
  };
  std::map<int32_t, Seen> layers;
  for (const RoutedCell& cell : cells_) ++layers[cell.layer()].cells;
  std::set<int32_t> all;
  for (const RoutedRecord& record : trace.records) ++layers[record.layer].by_rank[record.rank];
  for (const auto& [layer, seen] : layers) {
    for (const auto& [rank, count] : seen.by_rank) {
      all.insert(rank);
      if (2 * count >= seen.cells) ranks_[layer].push_back(rank);
    }
  }
  all_ranks_.assign(all.begin(), all.end());
}

void RoutedCells::judge(bool numbered_by_order, const TraceReading& reading) {
  std::set<std::pair<int32_t, int32_t>> shifted;  // step, layer
  for (RoutedCell& cell : cells_) {
    const std::vector<int32_t>& expected = ranks_[cell.layer()];
    size_t found = 0;
    int64_t total = 0;
    for (const RoutedRecord* record = cell.begin; record != cell.end; ++record) {
      total += record->tokens;
      if (found < expected.size() && expected[found] == record->rank) ++found;
    }
    cell.complete = found == expected.size();
    cell.balanced = static_cast<double>(total) / static_cast<double>(cell.end - cell.begin);
    if (!cell.complete && numbered_by_order) shifted.emplace(cell.step(), cell.layer());
  }
  for (RoutedCell& cell : cells_) {
    if (shifted.count({cell.step(), cell.layer()}) > 0) cell.complete = false;
    if (!cell.complete) ++incomplete_;
    if (reading.balanced_rows > 0) {
      cell.balanced = static_cast<double>(reading.balanced_rows);
      cell.complete = true;
    }
  }
}

}  // namespace bagualu
