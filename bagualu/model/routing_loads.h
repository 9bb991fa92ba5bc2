#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/model/model_spec.h"
#include "bagualu/model/routed_loads.h"
#include "bagualu/model/routing_cells.h"
#include "bagualu/model/routing_trace.h"

namespace bagualu {

/// What one rank received in one iteration, as factors of the balanced rows.
struct RankLoads {
  int32_t step = 0;
  int32_t rank = 0;
  std::vector<int32_t> layers;        ///< as the trace numbers them, ascending
  std::vector<int32_t> microbatches;  ///< ascending
  std::vector<double> factors;        ///< [microbatches][layers]

  double at(size_t microbatch, size_t layer) const {
    return factors[microbatch * layers.size() + layer];
  }
};

/// Loads of a rank in every iteration of the trace, in order. A factor that the trace does not give
/// (line lost, other ranks missing) is the rank's mean in that layer over the iteration's other
/// micro-batches, else 1. An iteration without this rank is left out.
std::vector<RankLoads> rank_loads(const RoutingTrace& trace, int32_t rank,
                                  const TraceReading& reading = {});

/// In every iteration the rank with most rows against the balanced ones, over all its layers and
/// micro-batches; of equals the lowest.
std::vector<RankLoads> hottest_rank_loads(const RoutingTrace& trace,
                                          const TraceReading& reading = {});

/// The planner's form of one rank's loads, every factor kept (RoutedLoads::by_microbatch).
/// Shapes:   layers of the model; those that the trace does not have are at 1
/// Requires: layers >= 1; first_layer as in RoutingTrace
RoutedLoads routed_loads(const RankLoads& loads, int64_t layers, int64_t first_layer);

/// One entry per iteration: what a job with this model meets. Layers that lie on the same ranks are
/// a pipeline stage; each stage is loaded as that of its ranks was which received most in this
/// iteration, so that every stage of the job is looked at with its own hottest rank.
/// Where RoutingTrace::moe_layers_only, numbers are places among the layers with experts, unless
/// one goes past the last place; else they are the model's.
/// Throws: InvalidInput(where, "layer") for a layer that has no experts in this model.
std::vector<RoutedLoads> iteration_loads(const RoutingTrace& trace, const ModelSpec& model,
                                         const std::string& where,
                                         const TraceReading& reading = {});

/// The first iterations of a router with random weights: hot, then calmer and calmer while the
/// balancing loss works.
///
/// factor(i) = calm + (start - calm) * 2^(-i / half_life) for i < iterations, calm afterwards.
/// Source: Megatron-Core's MoE guide advises 500 iterations before one trusts a Mixtral's speed and
///         memory. Half-life and start are ours: a 4-layer model with 16 experts and a balancing
///         loss of 0.01 began at 2.4 of at most 4 with 4 ranks and at 4.5 of at most 8 with 8, and
///         half of the excess over 1 was gone after about 30 iterations at a batch of 4,096 tokens.
struct ColdRouter {
  double start = 4.0;
  double calm = 1.2;
  double half_life = 100;
  int64_t iterations = 500;
};

/// Loads of iteration i >= 0, every layer and micro-batch alike.
/// largest: no routing can be worse (experts' ranks x min(top_k, local experts) / top_k); 0: none.
RoutedLoads cold_router(int64_t iteration, const ColdRouter& router = {}, double largest = 0);

}  // namespace bagualu
