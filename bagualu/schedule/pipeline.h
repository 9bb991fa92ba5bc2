// Pipeline orders as data: which pass of which micro-batch a rank runs after which. An order is
// generated, then simulated, measured and changed by separate functions; nothing is executed here.
//
// Glossary
//   stage    slice of the model's layers. A rank may hold several (interleaving, DualPipeV); with
//            1F1B it holds the one of its own number.
//   slack    how much longer one pass may take before the whole step does ("total float").
//   exposed  what the step's makespan grows by.
// Invariants
//   A pass starts as soon as the one before it on its rank and its inputs are there. Times are
//   integer nanoseconds, so that equal inputs give equal schedules on every machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bagualu {

/// One more kind (an input or weight gradient of a split backward) is one entry here, its letter in
/// pass_text() and its inputs in `inputs_of()` of pipeline.cpp.
enum class PassKind : uint8_t { kForward, kBackward };

/// One pass of one micro-batch through one stage; "2F0" is stage 2's forward of micro-batch 0.
struct PipelinePass {
  int stage = 0;
  PassKind kind = PassKind::kForward;
  int microbatch = 0;
  bool operator==(const PipelinePass&) const = default;
};

/// Text form: "2F0", "2B0".
std::string pass_text(const PipelinePass& pass);

struct PipelineOrder {
  int stages = 0;
  int microbatches = 0;
  std::vector<std::vector<PipelinePass>> ranks;  ///< by pipeline rank: its passes in order
};

/// Rank r runs stages - 1 - r forwards ahead, then one forward and one backward in turn, then the
/// backwards that are left.
/// Requires: stages and microbatches at least 1.
/// Source: Narayanan et al. 2021 (PipeDream-Flush, Megatron-LM).
PipelineOrder one_f_one_b(int stages, int microbatches);

/// Largest number of micro-batches that each rank holds at once, stages counted one by one: begun
/// in forward and not yet through backward.
std::vector<int> in_flight(const PipelineOrder& order);

/// What a rank holds at a moment of its largest sum.
struct ResidentMoment {
  PipelinePass at;                     ///< the forward that reaches it
  std::vector<PipelinePass> resident;  ///< the forwards whose bytes are held, oldest first
};

struct ResidentPeak {
  int64_t bytes = 0;
  std::vector<ResidentMoment> moments;  ///< every time it is reached, in order
};

/// Peak of each rank if a micro-batch holds its bytes from its forward to its backward.
/// Shapes:  bytes [stages][microbatches]
std::vector<ResidentPeak> resident_peaks(const PipelineOrder& order,
                                         const std::vector<std::vector<int64_t>>& bytes);

/// Shapes:  forward_ns, backward_ns [stages][microbatches], not negative
struct PipelineTimes {
  std::vector<std::vector<int64_t>> forward_ns;
  std::vector<std::vector<int64_t>> backward_ns;
  int64_t send_ns = 0;  ///< from the end of a pass to its neighbour stage on another rank
};

/// The same times for every stage and micro-batch.
PipelineTimes equal_times(const PipelineOrder& order, int64_t forward_ns, int64_t backward_ns,
                          int64_t send_ns = 0);

/// Shapes:  start_ns, end_ns as order.ranks
struct PipelineRun {
  std::vector<std::vector<int64_t>> start_ns;
  std::vector<std::vector<int64_t>> end_ns;
  int64_t makespan_ns = 0;
  std::vector<int64_t> bubble_ns;  ///< by rank: idle between 0 and the makespan
};

/// Earliest start and end of every pass, by longest path.
/// Throws:  InternalError if passes wait for each other, naming each rank's waiting pass and what
///          it waits for; if a pass is listed twice, or one that another needs is missing.
/// Cost:    O(passes * ranks)
PipelineRun simulate(const PipelineOrder& order, const PipelineTimes& times);

/// By how many ns each pass alone may be lengthened without a longer makespan. A longer pass costs
/// exactly what exceeds this.
/// Shapes:  as order.ranks
/// Throws:  as simulate()
std::vector<std::vector<int64_t>> slack(const PipelineOrder& order, const PipelineTimes& times);

struct PassDelay {
  PipelinePass pass;
  int64_t ns = 0;  ///< may be negative, as long as the pass stays at 0 or more
};

/// Growth of the makespan when these passes are lengthened together; several of one pass add up.
/// Slack is shared along a path, so this is not a sum over passes.
/// Throws:  as simulate()
int64_t exposed_ns(const PipelineOrder& order, const PipelineTimes& times,
                   const std::vector<PassDelay>& delays);

}  // namespace bagualu
