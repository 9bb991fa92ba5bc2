#pragma once

#include "bagualu/cost/op_cost.h"
#include "bagualu/cost/op_flops.h"
#include "bagualu/cost/system.h"
#include "bagualu/graph/megatron_moe.h"

namespace bagualu {

/// Work of one operator of a megatron graph at these loads of its layer: the FLOPs of its GEMMs and
/// of attention (causal: half of the square; a multiply-add counts two), every byte that it reads
/// and makes by the graph's own formulas, its weights once, and what it sends to other ranks.
/// Element-wise FLOPs are left out: memory bounds them on every machine.
OpWork megatron_forward_work(const Graph& graph, int op, const ModelSpec& spec,
                             const MegatronGraphOptions& options, const LayerLoad& load);

/// Twice the forward's products (attention: 3 with the query width, 2 with the value width) and
/// traffic, and the weights' fp32 gradients read and written.
OpWork megatron_backward_work(const Graph& graph, int op, const ModelSpec& spec,
                              const MegatronGraphOptions& options, const LayerLoad& load);

/// Cost table of a megatron graph from a machine's rates.
/// Requires: graph = build_megatron_graph(spec, options).
/// Source: docs/design.md, "Cost".
CostTable megatron_costs(const Graph& graph, const ModelSpec& spec,
                         const MegatronGraphOptions& options, const SystemSpec& system);

}  // namespace bagualu
