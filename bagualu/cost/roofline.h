#pragma once

#include "bagualu/cost/op_cost.h"
#include "bagualu/cost/op_flops.h"
#include "bagualu/cost/system.h"

namespace bagualu {

/// max(flops / (peak * efficiency), memory bytes / bandwidth, link bytes / link) + launch.
int64_t roofline_ns(const OpWork& work, Dtype dtype, const SystemSpec& system);

/// Copies to and from the host, and encoding, at the machine's rates.
void set_copy_rates(const SystemSpec& system, CostTable& costs);

/// Cost table of a native graph from a machine's rates, for where no profile has been taken.
/// Requires: graph = build_native_graph(spec, options).
/// Source: docs/design.md, "Cost".
CostTable roofline_costs(const Graph& graph, const ModelSpec& spec,
                         const NativeGraphOptions& options, const SystemSpec& system);

}  // namespace bagualu
