#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/schedule/replay.h"
#include "bagualu/schedule/timeline.h"

namespace bagualu {

/// Replay of one timeline that changes only where a layer's load changed: the timeline is cut where
/// layer or direction changes and at gates; a block remembers what it does to the bytes.
/// Exact: peak_from() equals replay_memory() of the same actions.
class BlockReplay {
 public:
  BlockReplay(const Graph& graph, const LoadDependence& dependence, Plan plan, Timeline timeline);

  const Plan& plan() const { return plan_; }
  /// Requires: `table` has the layer's new load.
  void update_layer(const MemoryTable& table, int layer);
  void update_all(const MemoryTable& table);

  /// Blocks from here on follow gate `gate` of the graph; -1: the start.
  int first_block(int gate) const { return first_block_[static_cast<size_t>(gate + 1)]; }

  struct Peak {
    int64_t bytes = 0;
    int64_t host_bytes = 0;
  };
  /// Peaks of the rest if so much is live before `block`. Between forward and backward others take
  /// `turn_bytes` for a while; `backward_shift_bytes` come on top when backward begins.
  Peak peak_from(int block, int64_t live_bytes, int64_t host_live_bytes, int64_t turn_bytes,
                 int64_t backward_shift_bytes) const;

  /// What the blocks do, to be kept and put back (loads as they were then).
  const std::vector<ReplaySpan>& spans() const { return spans_; }
  void set_spans(const std::vector<ReplaySpan>& spans) { spans_ = spans; }

 private:
  void cut();
  void find_layers(const LoadDependence& dependence);

  const Graph& graph_;
  Plan plan_;
  Timeline timeline_;
  std::vector<size_t> begin_;  ///< by block, and the end
  std::vector<ReplaySpan> spans_;
  std::vector<int> first_block_;
  int first_backward_block_ = 0;
  std::vector<std::vector<int>>
      blocks_of_layer_;  ///< blocks whose bytes depend on the layer's load
};

}  // namespace bagualu
