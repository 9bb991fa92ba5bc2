#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/provision/policy.h"
#include "bagualu/schedule/pipeline.h"

namespace bagualu {

struct StageOptions {
  /// End at the first pass that exceeds a budget; else it is noted and the rank goes on.
  bool stop_at_death = false;
};

/// One decision point: before a micro-batch's first op, or a gate.
struct StageDecision {
  int microbatch = -1;
  int gate = -1;
  Decision decision;
  /// Reached from here to the rank's next decision or its end, demotions and the backwards of other
  /// micro-batches included.
  int64_t peak_bytes = 0;
};

/// What became of one micro-batch.
struct StageMicrobatch {
  int64_t rest_bytes = 0;    ///< at the end of its forward
  int64_t exposed_ns = 0;    ///< of its final plan, and of what it gave up while it rested
  int demotions = 0;         ///< storages given up by the time its backward begins
  bool repeat_step = false;  ///< a decision of its asked for the step to be repeated
};

struct StageRun {
  MemoryReplay memory;  ///< all micro-batches together; peaks really reached
  std::vector<StageDecision> decisions;
  std::vector<StageMicrobatch> microbatches;
  std::vector<PipelinePass> deaths;  ///< passes that exceeded a budget
};

/// Runs `policy` over one rank's passes of a pipeline step as the runtime does it: every action is
/// replayed against one memory. At every decision the policy sees the loads up to its gate,
/// `balanced` beyond, and the other micro-batches in flight.
/// Shapes:   loads [order.microbatches][graph.layers]
/// Requires: the rank holds one stage, and its backwards come in the order of its forwards (1F1B).
StageRun drive_stage(const ProvisionContext& context, Policy& policy, const PipelineOrder& order,
                     int rank, const std::vector<std::vector<LayerLoad>>& loads,
                     const StageOptions& options = {});

}  // namespace bagualu
