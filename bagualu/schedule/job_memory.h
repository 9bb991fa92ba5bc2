// Memory of a training job's pipeline ranks over a step. Start here: JobMemory.
//
// Glossary
//   saved       what a layer's forward leaves for its backward; affine in the rows R its experts
//   get. transient   what lives only inside one forward or one backward of a layer. layer kind
//   layers with the same shapes, settings and residencies; sized once. balanced    RoutedLoads
//   factor 1: R = Job::balanced_rows().
// Invariants
//   Peaks are of the allocator's count (torch.cuda.max_memory_allocated): communication bytes
//   outside it and the allocator's reserve are separate fields.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/model/job.h"
#include "bagualu/model/routed_loads.h"
#include "bagualu/schedule/pipeline.h"

namespace bagualu {

/// One tensor of a layer, of the head or of the model's state.
struct TensorRow {
  std::string name;     ///< "layer10.expert_fc1.out"; "parameters" and others of the state
  std::string op;       ///< that makes it
  std::string formula;  ///< "32768 rows * 8192 B", numbers put in
  int64_t bytes = 0;    ///< at the loads asked for; of all `count` together
  int64_t count = 1;    ///< equal ones alive, as of several layers and micro-batches
  bool saved = false;   ///< kept for backward; else transient or state
};

struct KindBytes {
  std::string kind;  ///< "parameters", ..., "activations", "transients"
  int64_t bytes = 0;
};

/// Where the peak of a rank is.
struct PeakCause {
  PipelinePass pass;   ///< virtual stage, micro-batch, forward or backward
  int64_t layer = -1;  ///< of the model; -1: embedding, head
  std::string op;      ///< "layer10.combine_unpack", "lm_head"
};

struct RankMemory {
  int64_t pp_rank = 0;
  int64_t static_bytes = 0;
  int64_t peak_bytes = 0;           ///< static ones included
  int64_t communication_bytes = 0;  ///< outside the allocator's count
  int64_t reserved_bytes = 0;       ///< peak and what the allocator holds beyond it
  PeakCause cause;
  int64_t in_flight = 0;  ///< (virtual stage, micro-batch) pairs resident at the peak, its own too
  std::vector<TensorRow> largest;  ///< ten at most, largest first
  std::vector<KindBytes> by_kind;  ///< sums to peak_bytes
};

/// A pass of a rank and its bytes.
struct JobMemoryPoint {
  PipelinePass pass;
  int64_t saved_bytes = 0;  ///< of micro-batches in flight when the pass begins
  int64_t peak_bytes = 0;   ///< highest inside the pass; both with static bytes
};

class LayerProfileCache;

/// Memory of one job's pipeline ranks.
/// Threads: one at a time, also of jobs that share a cache.
/// Cost: construction sizes each kind of layer once (tens of us each, none with a warm cache);
/// peak_bytes() about 1 us.
class JobMemory {
 public:
  /// Requires: the job passed validate(). `cache` may be null; with one, layer kinds sized for
  /// another job are taken from it. It outlives this object.
  explicit JobMemory(const Job& job, LayerProfileCache* cache = nullptr);
  ~JobMemory();
  JobMemory(JobMemory&&) noexcept;

  int64_t static_bytes(int64_t pp_rank) const;
  int64_t peak_bytes(int64_t pp_rank, const RoutedLoads& loads) const;
  RankMemory describe(int64_t pp_rank, const RoutedLoads& loads) const;
  /// One point per pass, in the rank's order.
  std::vector<JobMemoryPoint> over_time(int64_t pp_rank, const RoutedLoads& loads) const;
  /// Every tensor of a layer if its experts receive `factor` of the balanced rows.
  std::vector<TensorRow> tensors(int64_t layer, double factor = 1.0) const;
  /// Saved bytes of one layer for one micro-batch if its experts receive `factor` of the balanced
  /// rows. Cost: below 0.1 us.
  int64_t layer_bytes(int64_t layer, double factor) const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

/// Keeps sized layer kinds between jobs, as a search needs. Not thread-safe.
class LayerProfileCache {
 public:
  LayerProfileCache();
  ~LayerProfileCache();

 private:
  friend class JobMemory;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace bagualu
