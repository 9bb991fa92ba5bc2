#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/graph/graph.h"
#include "bagualu/model/job.h"

namespace bagualu {

/// Bytes as a function of the rows a layer's experts receive.
struct RowBytes {
  int64_t fixed = 0;
  int64_t per_row = 0;

  int64_t at(int64_t rows) const { return fixed + per_row * rows; }
  RowBytes& operator+=(const RowBytes& other) {
    fixed += other.fixed;
    per_row += other.per_row;
    return *this;
  }
  RowBytes& operator-=(const RowBytes& other) {
    fixed -= other.fixed;
    per_row -= other.per_row;
    return *this;
  }
  bool operator==(const RowBytes&) const = default;
};

/// What is alive inside one operator's pass.
struct LayerLevel {
  RowBytes bytes;
  int step = 0;  ///< of the layer's walk: finds the operator and its tensors again
};

/// One layer, or the head, sized for every load: saved bytes and what its passes need.
struct LayerProfile {
  RowBytes input;      ///< its input, part of `saved`
  RowBytes saved;      ///< kept from forward to backward, on the device
  RowBytes offloaded;  ///< kept on the host meanwhile
  /// Saved tensors of 1 MiB or more, largest first; those that are views across another first-come
  /// last (`strided`), as Megatron-Kwai offloads them.
  struct Movable {
    int64_t bytes = 0;
    bool strided = false;
  };
  std::vector<Movable> movable;
  std::vector<int64_t> block_bytes;  ///< sizes of all tensors, ascending, each once
  /// Kept until the whole stage's backward has ended, as a head whose logits somebody still holds;
  /// not part of `saved`.
  RowBytes late;
  /// Above the bytes before the layer's forward. Only levels that are highest at some load.
  std::vector<LayerLevel> forward;
  /// In place of the layer's saved bytes, offloaded ones reloaded.
  std::vector<LayerLevel> backward;

  int64_t forward_bytes(int64_t rows) const;
  int64_t backward_bytes(int64_t rows) const;
};

/// A module whose intermediates are given up after its forward and made again before its backward.
struct RecomputeRegion {
  std::vector<int> ops;          ///< in order
  bool discards_output = false;  ///< also what others read of it (CheckpointWithoutOutput)
};

/// What a step of the walk holds, for reports.
struct WalkMoment {
  bool backward = false;
  int op = -1;
  std::vector<int> alive;  ///< storages
  RowBytes scratch;
};

struct WalkSettings {
  std::vector<RecomputeRegion> regions;
  std::vector<uint8_t> offloaded;  ///< by storage; empty: none
  int64_t rounding_bytes = 1;      ///< tensors without rows are rounded up to it
};

/// The settings that a job's recompute modules and offload modules mean in this graph.
WalkSettings walk_settings(const Graph& graph, const Job& job);

/// Runs forward and backward of a graph whose first op receives and whose last op sends or is the
/// loss, counting bytes.
/// Cost: O(storages + operators).
LayerProfile profile_layer(const Graph& graph, const WalkSettings& settings);

/// As profile_layer(), and tells what is alive at `step`.
WalkMoment moment_of(const Graph& graph, const WalkSettings& settings, int step);

/// Bytes of a storage as the walk counts them.
RowBytes storage_row_bytes(const Graph& graph, int storage, int64_t rounding_bytes);

}  // namespace bagualu
