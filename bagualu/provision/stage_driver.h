#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/provision/policy.h"
#include "bagualu/provision/rank_driver.h"
#include "bagualu/schedule/pipeline.h"

namespace bagualu {

struct StageOptions {
  /// End at the first pass that exceeds a budget; else it is noted and the rank goes on.
  bool stop_at_death = false;
};

/// Runs `policy` over one rank's passes of a pipeline step as the runtime does it: every action is
/// replayed against one memory. At every decision the policy sees the loads up to its gate,
/// `balanced` beyond, and the other micro-batches in flight.
/// Shapes:   loads [order.microbatches][graph.layers]
/// Requires: the rank holds one stage, and its backwards come in the order of its forwards (1F1B).
RankRun drive_stage(const ProvisionContext& context, Policy& policy, const PipelineOrder& order,
                    int rank, const std::vector<std::vector<LayerLoad>>& loads,
                    const StageOptions& options = {});

}  // namespace bagualu
