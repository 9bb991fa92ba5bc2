#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "bagualu/schedule/replay.h"

namespace bagualu {

/// Live bytes of a rank and of each of its stages, as its actions are replayed one by one.
class RankMemory {
 public:
  explicit RankMemory(size_t stages) : stages_(stages) {}

  void reset() {
    std::fill(stages_.begin(), stages_.end(), MemoryReplay{});
    total_ = {};
    highest_bytes_ = highest_host_bytes_ = 0;
  }

  /// Returns: the highest live value inside the action.
  int64_t step(int stage, const Graph& graph, const Plan& plan, const MemoryTable& table,
               const Action& action) {
    const int64_t live = total_.live_bytes, host = total_.host_live_bytes;
    const int64_t high = replay_action(graph, plan, table, action, total_);
    MemoryReplay& own = stages_[static_cast<size_t>(stage)];
    own.live_bytes += total_.live_bytes - live;
    own.host_live_bytes += total_.host_live_bytes - host;
    return high;
  }

  /// Peaks of total() count from here on.
  void begin_peak() {
    total_.peak_bytes = total_.live_bytes;
    total_.host_peak_bytes = total_.host_live_bytes;
  }
  void end_peak() {
    highest_bytes_ = std::max(highest_bytes_, total_.peak_bytes);
    highest_host_bytes_ = std::max(highest_host_bytes_, total_.host_peak_bytes);
  }

  const MemoryReplay& total() const { return total_; }
  /// total() with peaks that count from here: where a forecast begins.
  MemoryReplay now() const {
    MemoryReplay from_here = total_;
    from_here.peak_bytes = from_here.live_bytes;
    from_here.host_peak_bytes = from_here.host_live_bytes;
    return from_here;
  }
  /// Without peaks.
  const MemoryReplay& of(int stage) const { return stages_[static_cast<size_t>(stage)]; }
  int64_t highest_bytes() const { return highest_bytes_; }
  int64_t highest_host_bytes() const { return highest_host_bytes_; }

 private:
  std::vector<MemoryReplay> stages_;
  MemoryReplay total_;
  int64_t highest_bytes_ = 0;
  int64_t highest_host_bytes_ = 0;
};

}  // namespace bagualu
