#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bagualu/graph/megatron_moe.h"
#include "bagualu/model/job_static.h"
#include "bagualu/schedule/job_memory.h"
#include "bagualu/schedule/layer_profile.h"
#include "bagualu/schedule/rank_moments.h"

namespace bagualu {

enum class LayerKind : uint8_t { kDense, kMoe, kHead };

/// Everything that the sizes of a kind of layer depend on, its loads aside.
struct LayerKey {
  std::array<int64_t, 33> numbers{};
  double capacity_factor = 0;
  double offload_fraction = 1;
  std::vector<std::string> modules, offload_modules;
  bool operator<(const LayerKey& other) const {
    return std::tie(numbers, capacity_factor, offload_fraction, modules, offload_modules) <
           std::tie(other.numbers, other.capacity_factor, other.offload_fraction, other.modules,
                    other.offload_modules);
  }
};
LayerKey layer_key(const Job& job, LayerKind kind);

struct KindProfile {
  LayerProfile profile;
  LayerProfile whole;  ///< nothing recomputed or offloaded: what full recompute makes again
};

/// The graph of one layer of a kind, or of the head.
Graph kind_graph(const Job& job, LayerKind kind);

/// One virtual stage with one micro-batch.
struct StageBytes {
  int64_t saved = 0;
  int64_t moved = 0;  ///< of `saved`, under "offload all": on the host but for the passes around
  /// With `moved`: the tensor that is moved in part. Its rest is copied aside when it goes, and all
  /// of it is made anew when it comes back.
  int64_t cut = 0;
  int64_t slack =
      0;  ///< by which that rest's block is too large, while the micro-batch is in flight
  int64_t forward = 0;   ///< highest above what was there before
  int64_t backward = 0;  ///< highest in place of `saved`
  // Where those are: number of the part (layer of the stage, or the head behind them).
  int forward_part = 0;
  int backward_part = 0;
};

/// The highest moment of a rank.
struct RankPeak {
  int64_t bytes = -1;  ///< above the static ones
  PipelinePass pass;
  int part = 0;
  int64_t in_flight = 0;
  int64_t held = 0;                    ///< boundary tensors that outlive their pass
  std::vector<PipelinePass> resident;  ///< forwards whose bytes are held, the pass's own included
};

/// Orders of passes by shape, each made once.
class OrderStore {
 public:
  /// The reference is good as long as the store.
  const PipelineOrder& of(PipelineKind kind, int pp, int chunks, int microbatches);
  /// rank_moments() of every rank.
  const std::vector<std::vector<RankMoment>>& moments(PipelineKind kind, int pp, int chunks,
                                                      int microbatches);

 private:
  using Shape = std::tuple<PipelineKind, int, int, int>;
  std::map<Shape, PipelineOrder> orders_;
  std::map<Shape, std::vector<std::vector<RankMoment>>> moments_;
};

/// Layers of one kind that follow each other in a stage.
struct LayerRun {
  LayerKind kind = LayerKind::kDense;
  int64_t count = 0;
};

struct JobMemory::State {
  State(const Job& made_for, LayerProfileCache* cache);

  std::shared_ptr<const KindProfile> kind(LayerKind which, LayerProfileCache* cache) const;
  LayerKind kind_of(int64_t layer) const {
    return job.model.is_moe(layer) ? LayerKind::kMoe : LayerKind::kDense;
  }
  const KindProfile& layer_kind(int64_t layer) const {
    return *kinds[static_cast<size_t>(kind_of(layer))];
  }

  StageBytes stage_bytes(int64_t stage, const RoutedLoads& loads, int64_t microbatch) const;
  StageBytes full_recompute_bytes(int64_t stage, const RoutedLoads& loads,
                                  int64_t microbatch) const;
  /// Passes of the rank in order. `microbatches`: of the step, or fewer where all are alike.
  const std::vector<PipelinePass>& passes(int64_t pp_rank, int64_t microbatches) const;
  RankPeak walk_rank(int64_t pp_rank, const RoutedLoads& loads, std::vector<JobMemoryPoint>* points,
                     bool with_resident = false) const;

  /// Boundary tensors that are alive beside a pass.
  int64_t held_bytes(const PipelinePass& pass, bool backward_seen) const;
  /// walk_rank().bytes if every micro-batch is alike, without the walk.
  int64_t alike_peak(int64_t pp_rank, const RoutedLoads& loads) const;

  Job job;
  ModelParameters parameters;
  std::array<std::shared_ptr<const KindProfile>, 3> kinds;
  std::shared_ptr<OrderStore> orders;       ///< shared with other jobs through a cache
  std::vector<std::vector<LayerRun>> runs;  ///< by stage
  std::vector<int64_t> static_bytes;        ///< by pipeline rank
  bool offloads_all = false;                ///< Megatron-Kwai's rule: a fraction of all saved bytes
  int64_t boundary_bytes = 0;               ///< a micro-batch's tensor between two stages
  int64_t embedding_gradient_bytes = 0;     ///< of the whole matrix, before it is added
};

}  // namespace bagualu
