#pragma once

#include <cstdint>

#include "bagualu/cost/job_cost.h"
#include "bagualu/cost/op_cost.h"
#include "bagualu/cost/system.h"
#include "bagualu/graph/graph.h"
#include "bagualu/model/job.h"

namespace bagualu {

/// Cost table of one stage's megatron graph at the prices of JobCost: every operator of a JobOpList
/// is charged to the graph's operator that does its work. What tp, cp and etp ranks wait for each
/// other is part of the operator that waits; dispatch and combine have the whole price of their
/// exchange, sends and receives of a stage that of a message.
/// Operators that follow rows have points from no rows to largest_rows; all others one, at the
/// balanced load. Copy rates are the machine's.
/// Layers past the model's last are those of the multi-token prediction; a head of their own is
/// part of their last operator.
/// Requires: graph = build_megatron_graph() of one stage of this job with megatron_options(job).
/// Ensures:  at the balanced load forward and backward of a layer add up to JobCost::layer() before
///           what that hides beside the rows' exchange.
/// Source:   docs/design.md, "Cost of jobs".
CostTable job_graph_costs(const Graph& graph, const Job& job, const SystemSpec& system,
                          int64_t largest_rows);

}  // namespace bagualu
