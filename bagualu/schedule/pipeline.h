// Pipeline orders as data: which pass of which micro-batch a rank runs after which. An order is
// generated, then simulated, measured and changed by separate functions; nothing is executed here.
//
// Glossary
//   stage    virtual stage: slice of the model's layers, numbered in the model's order. A rank may
//            hold several (interleaving, the V shapes); with 1F1B it holds the one of its own
//            number.
//   split    a backward of two passes: the input gradient, which the stage before waits for, and
//            the weight gradient, which nothing of the step waits for.
//   span     of a rank: from the start of its first pass to the end of its last.
//   slack    how much longer one pass may take before the whole step does ("total float").
//   exposed  what the step's makespan grows by.
// Invariants
//   A pass starts as soon as the one before it on its rank and its inputs are there. Times are
//   integer nanoseconds, so that equal inputs give equal schedules on every machine.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/model/job.h"

namespace bagualu {

/// A micro-batch runs backward through a stage either as one kBackward, or as a kInputGrad and,
/// any time later on the same rank, a kWeightGrad. Between its forward and its (whole or input
/// gradient's) backward it may be recomputed, and offloaded and then reloaded. The copies start
/// where the list says, but on engines of their own (one per direction, in order): the rank goes
/// on, and only the backward waits for them. No generator lists these three.
/// One more kind is one entry here, its letter in kPassLetters, its inputs in PassGraph
/// (pass_graph.cpp), its time in pipeline.cpp and its rule in pipeline_check.cpp.
enum class PassKind : uint8_t {
  kForward,
  kBackward,
  kInputGrad,
  kWeightGrad,
  kRecompute,
  kOffload,
  kReload,
};
/// By PassKind.
inline constexpr std::string_view kPassLetters = "FBIWROL";

/// One pass of one micro-batch through one stage; "2F0" is stage 2's forward of micro-batch 0.
struct PipelinePass {
  int stage = 0;
  PassKind kind = PassKind::kForward;
  int microbatch = 0;
  bool operator==(const PipelinePass&) const = default;
};

/// Text form: "2F0", "2B0", "2I0", "2W0", "2R0", "2O0", "2L0".
std::string pass_text(const PipelinePass& pass);

struct PipelineOrder {
  int stages = 0;
  int microbatches = 0;
  std::vector<std::vector<PipelinePass>> ranks;  ///< by pipeline rank: its passes in order
  bool operator==(const PipelineOrder&) const = default;
};

/// Times of the passes of one virtual stage, the same for all; a whole backward takes
/// input_grad_ns + weight_grad_ns.
struct PassTimes {
  int64_t forward_ns = 1;
  int64_t input_grad_ns = 1;
  int64_t weight_grad_ns = 1;
  int64_t send_ns = 0;
  auto operator<=>(const PassTimes&) const = default;
};

/// The order of `kind` for pp ranks. V-shaped orders have 2 * pp stages, rank r holding r and
/// 2 * pp - 1 - r. DualPipe has pp stages and two copies of the model: micro-batches below
/// (microbatches + 1) / 2 run stage s on rank s, the others on rank pp - 1 - s.
/// Requires: what check_order_shape() does; the kinds without virtual stages ignore
///           virtual_per_rank.
/// Cost:     O(passes), measured by BM_Order.
/// Source:   docs/design.md, Pipeline orders (one line per kind).
PipelineOrder make_order(PipelineKind kind, int pp, int virtual_per_rank, int microbatches);

/// Throws InvalidInput(where) naming what an order does not allow: counts below 1, of DualPipe an
/// odd number of ranks, of interleaving more micro-batches than ranks that are no multiple of them.
void check_order_shape(PipelineKind kind, int pp, int virtual_per_rank, int microbatches,
                       const std::string& where);

/// Rank that runs a pass.
int rank_of_pass(PipelineKind kind, int pp, int microbatches, const PipelinePass& pass);

/// Rank r runs stages - 1 - r forwards ahead, then one forward and one backward in turn, then the
/// backwards that are left.
/// Requires: stages and microbatches at least 1.
/// Source: Narayanan et al. 2021 (PipeDream-Flush, Megatron-LM).
PipelineOrder one_f_one_b(int stages, int microbatches);

/// Megatron's interleaved order: stage c * pp + r is chunk c of rank r. Micro-batches go in groups
/// of `group` (0: pp, Megatron's default), each through all chunks of a rank before the next group;
/// rank r runs 2 (pp - 1 - r) + (chunks - 1) group forwards ahead.
/// Requires: counts at least 1; group 0 or at least pp; as in Megatron a last group behind others
///           has at least pp micro-batches, or ranks would wait for each other (with one chunk
///           there are no groups). Unlike there, fewer than pp in all are allowed.
/// Source: Narayanan et al. 2021; microbatch_group_size_per_vp_stage of Megatron-Core 0.9.
PipelineOrder interleaved(int pp, int chunks, int microbatches, int group = 0);

/// Largest number of activations of one micro-batch in one virtual stage that each rank holds at
/// once: from the forward to the end of the backward, a split one's being its weight gradient.
/// Throws: InternalError for passes that recompute or copy: then activations are not the question.
std::vector<int> in_flight(const PipelineOrder& order);

/// What a rank holds at a moment of its largest sum.
struct ResidentMoment {
  PipelinePass at;                     ///< the pass that reaches it
  std::vector<PipelinePass> resident;  ///< the forwards whose bytes are held, oldest first
};

struct ResidentPeak {
  int64_t bytes = 0;
  std::vector<ResidentMoment> moments;  ///< every time it is reached, in order
};

/// Peak of each rank if a micro-batch holds its bytes from its forward to its backward. With a
/// split backward, `weight_grad_bytes` of them (by default all) stay from the input gradient to the
/// weight gradient. Bytes are added when a forward begins and taken away when a backward ends.
/// Shapes:  bytes, weight_grad_bytes [stages][microbatches]
/// Throws:  as in_flight()
std::vector<ResidentPeak> resident_peaks(const PipelineOrder& order,
                                         const std::vector<std::vector<int64_t>>& bytes);
std::vector<ResidentPeak> resident_peaks(
    const PipelineOrder& order, const std::vector<std::vector<int64_t>>& bytes,
    const std::vector<std::vector<int64_t>>& weight_grad_bytes);

/// Shapes:  all [stages][microbatches], not negative
struct PipelineTimes {
  std::vector<std::vector<int64_t>> forward_ns;
  std::vector<std::vector<int64_t>> backward_ns;  ///< whole, split or not
  int64_t send_ns = 0;  ///< from the end of a pass to its neighbour stage on another rank
  /// The part of backward_ns that a weight gradient takes; may be empty if the order splits none.
  std::vector<std::vector<int64_t>> weight_grad_ns;
  /// May be empty if the order lists no such pass.
  std::vector<std::vector<int64_t>> recompute_ns, offload_ns, reload_ns;
};

/// The same times for every stage and micro-batch.
PipelineTimes equal_times(const PipelineOrder& order, int64_t forward_ns, int64_t backward_ns,
                          int64_t send_ns = 0);
PipelineTimes equal_times(const PipelineOrder& order, const PassTimes& times);

/// Shapes:  start_ns, end_ns as order.ranks
struct PipelineRun {
  std::vector<std::vector<int64_t>> start_ns;
  std::vector<std::vector<int64_t>> end_ns;
  int64_t makespan_ns = 0;
  std::vector<int64_t> bubble_ns;  ///< by rank: compute idle between 0 and the makespan
  std::vector<int64_t> span_ns;    ///< by rank: from its first start to its last end, copies aside
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
