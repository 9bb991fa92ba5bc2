// Pipeline orders with dual-batch slots: a forward and a backward of two micro-batches that a rank
// runs as one, so that the communication of one hides behind the compute of the other.
//
// Glossary
//   slot  two neighbouring passes of a rank's list, a forward and then a backward (whole, or an
//         input gradient) of another micro-batch, that run interleaved. A slot starts when the
//         inputs of both are there, and both results leave at its end.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/schedule/pipeline.h"

namespace bagualu {

struct OverlapOrder {
  PipelineOrder order;
  /// By rank and pass, as order.ranks: passes k and k + 1 are one slot.
  std::vector<std::vector<bool>> fused;
  bool operator==(const OverlapOrder&) const = default;
};

/// The order that a job with pp ranks runs: with `overlap`, one with slots, else make_order()'s
/// without any. Unlike make_order(), interleaved takes any number of micro-batches: what pp leaves
/// over goes into the first group.
///   1f1b         rank r runs 2 (pp - 1 - r) + 1 forwards ahead. A slot's results leave at its end,
///                so a micro-batch needs a slot per rank on the way there and one on the way back;
///                with 1F1B's pp - 1 - r neighbours would take turns idling.
///   interleaved  one forward more than Megatron's warm-up, for the slot's own backward.
///   zb-h1        as 1f1b, weight gradients r micro-batches behind.
///   zb-h2        as zb-h1, 2 r behind.
///   zb-v         DualPipeV's lists and pairs with every backward split. ZB-V's own warm-up holds
///                just what unfused passes need.
///   dualpipe, dualpipe-v  the pairs that the published orders run overlapped.
/// Ensures:  order_fault() has nothing to say; without overlap and where make_order() takes the
///           shape, the order is make_order()'s.
/// Throws:   InvalidInput as make_order(); with overlap for v-half, whose point is to hold fewer
///           micro-batches than slots need.
/// Source:   ours, from the orders named in make_order()
OverlapOrder make_overlap_order(PipelineKind kind, int pp, int virtual_per_rank, int microbatches,
                                bool overlap = true);

/// Throws InvalidInput(where) naming what make_overlap_order() does not take.
void check_overlap_shape(PipelineKind kind, int pp, int virtual_per_rank, int microbatches,
                         bool overlap, const std::string& where);

/// An order without slots.
OverlapOrder without_slots(PipelineOrder order);

/// What is wrong with it, in one line: what order_fault() of the passes says; a slot that is not a
/// forward and then a backward of another micro-batch; slots that wait for each other.
std::optional<std::string> order_fault(const OverlapOrder& order);
std::optional<std::string> order_fault(const OverlapOrder& order, PipelineKind kind);

/// Time of the slot that begins at order.ranks[rank][pass], of passes that alone take forward_ns
/// and backward_ns.
using SlotNs =
    std::function<int64_t(size_t rank, size_t pass, int64_t forward_ns, int64_t backward_ns)>;

/// As simulate() of an order without slots; both passes of a slot start and end with it. Without
/// slot_ns a slot takes as long as its passes together.
/// Throws:  as simulate(), slots counting as one pass
PipelineRun simulate(const OverlapOrder& order, const PipelineTimes& times,
                     const SlotNs& slot_ns = {});

/// As in_flight(): while a slot runs, both of its micro-batches are held.
std::vector<int> in_flight(const OverlapOrder& order);

/// As order_text(), a slot as "[2F3|2B0]".
std::string order_text(const OverlapOrder& order);
/// The exact inverse; what order_text() of an order without slots writes is read too.
/// Throws:  as parse_order()
OverlapOrder parse_overlap_order(std::string_view text, const std::string& where);

/// As those of pipeline_text.h. A slot is drawn as "F3B0", or "X" where that does not fit; in the
/// SVG as two halves, the forward above.
std::string draw_order(const OverlapOrder& order, const PipelineRun& run, int columns = 100);
std::string draw_order_svg(const OverlapOrder& order, const PipelineRun& run, int width = 1200);

}  // namespace bagualu
