// Dual-batch schedules: in which order one rank issues the operators of one micro-batch's forward
// and another one's backward, so that the one's all-to-alls run beside the other's compute.
//
// Glossary
//   chain     operators that follow each other: the forward of one micro-batch, the backward (input
//             gradients) of another.
//   filler    work on the compute stream that fills gaps: weight gradients, rebuilds (recompute).
//   copy      offload (out) and reload (in), each on its own engine. Issued as soon as what it
//             waits for is issued, which is never worse, so an order does not list copies.
//   order     the sequence in which the one issuing thread hands items to the streams. Every
//             stream runs its items in that order.
//   pending   weight gradients whose backward operator is issued and that are not themselves.
//   lead      rebuilds issued whose backward operator is not: their outputs occupy memory.
//   bound     no order of the instance ends sooner.
// Invariants
//   Times are integer nanoseconds, ties are broken by index, nothing is random: equal instances and
//   options give equal orders on every machine (unless a deadline ends the search).
//   Memory is a set of hard edges: windows of weight gradients and rebuilds, copies that must end
//   before something may start. An order that breaks one is never returned.
#pragma once

#include <cstdint>
#include <vector>

namespace bagualu {

/// What an operator occupies while it runs; each runs one item at a time, in issue order.
enum class Resource : uint8_t { kCompute, kComm, kD2h, kH2d };
inline constexpr int kResourceCount = 4;

/// One operator of a chain; starts when the one before it in its chain has ended.
struct ChainOp {
  int64_t ns = 0;
  Resource resource = Resource::kCompute;  ///< kCompute or kComm
  /// The issuing thread waits for its end (reading token counts): nothing issued after it starts
  /// before it has ended.
  bool host_sync = false;
  /// Layer it belongs to; only whether neighbours of one chain have equal ones counts, and only
  /// for pinned_comm_order().
  int layer = 0;
  bool operator==(const ChainOp&) const = default;
};

/// A weight gradient: compute that may start when backward operator `after_backward` has ended.
struct WeightGradFiller {
  int64_t ns = 0;
  int after_backward = 0;
  bool operator==(const WeightGradFiller&) const = default;
};

/// A rebuild: compute that must have ended before backward operator `before_backward` starts.
struct RebuildFiller {
  int64_t ns = 0;
  int before_backward = 0;
  bool operator==(const RebuildFiller&) const = default;
};

/// An offload on the D2H engine.
struct CopyOut {
  int64_t ns = 0;
  int source_forward = 0;         ///< starts when this forward operator has ended
  int releases_for_forward = -1;  ///< this later forward operator starts only after it; -1: none
  bool operator==(const CopyOut&) const = default;
};

/// A reload on the H2D engine.
struct CopyIn {
  int64_t ns = 0;
  int wanted_by_backward = 0;    ///< this backward operator starts only after it
  int wanted_by_rebuild = -1;    ///< and this rebuild (an index into rebuilds); -1: none
  int not_before_backward = -1;  ///< starts when this one has freed its buffer (ended); -1: at once
  bool operator==(const CopyIn&) const = default;
};

enum class ItemKind : uint8_t { kForward, kBackward, kWeightGrad, kRebuild };

/// One item of an order: `index` counts in the instance's vector of that kind.
struct ScheduleItem {
  ItemKind kind = ItemKind::kForward;
  int index = 0;
  bool operator==(const ScheduleItem&) const = default;
};

/// What is to be scheduled; plain data. Any part may be empty.
/// Requires (check_instance): fillers and copies are sorted by the operator that they name (both
/// operators, for copies in); every kind is issued in index order.
struct DualBatchInstance {
  std::vector<ChainOp> forward;
  std::vector<ChainOp> backward;
  std::vector<WeightGradFiller> weight_grads;
  std::vector<RebuildFiller> rebuilds;
  std::vector<CopyOut> copies_out;
  std::vector<CopyIn> copies_in;
  /// While more weight gradients than this are pending only weight gradients may be issued.
  int weight_lag = 2;
  /// A rebuild may be issued while fewer than this many lead, or if the next backward operator
  /// itself needs it.
  int rebuild_lead = 3;
  /// Order of all kComm operators of both chains, if given: the ranks of a group must agree on it,
  /// see pinned_comm_order(). Empty: the solver chooses.
  std::vector<ScheduleItem> comm_order;
  bool operator==(const DualBatchInstance&) const = default;
};

/// Throws: InternalError if the instance contradicts itself (an index outside, an order of fillers
/// or of communication that its chains cannot follow, a negative time).
void check_instance(const DualBatchInstance& instance);

/// The order of communication that all ranks of a group agree on: per pair of layers with
/// communication the first half of the backward's operators (combine), the forward's but the last
/// (counts, dispatch), the backward's rest (dispatch), the forward's last (combine); a chain with
/// more layers ends alone. Depends on resources and layers, never on durations.
std::vector<ScheduleItem> pinned_comm_order(const DualBatchInstance& instance);

struct TimeSpan {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  bool operator==(const TimeSpan&) const = default;
};

/// When everything runs if the order is issued with the instance's durations.
struct DualBatchReplay {
  std::vector<TimeSpan> forward;
  std::vector<TimeSpan> backward;
  std::vector<TimeSpan> weight_grads;
  std::vector<TimeSpan> rebuilds;
  std::vector<TimeSpan> copies_out;
  std::vector<TimeSpan> copies_in;
  int64_t makespan_ns = 0;  ///< end of the last item, copies included
};

/// Everything starts as soon as its stream and what it waits for allow.
/// Throws: InternalError if the order is no order of this instance: incomplete, out of index
/// order, outside a window, against comm_order, or an item whose inputs are not issued.
DualBatchReplay replay(const DualBatchInstance& instance, const std::vector<ScheduleItem>& order);

enum class ScheduleSource : uint8_t { kFixed, kGreedy, kBeam, kExact, kCache };

struct DualBatchSchedule {
  std::vector<ScheduleItem> order;
  int64_t makespan_ns = 0;  ///< of replay(instance, order)
  int64_t bound_ns = 0;     ///< lower bound of every order's makespan
  ScheduleSource source = ScheduleSource::kFixed;
  bool cut_short = false;  ///< the deadline or max_labels ended the search
  bool optimal() const { return makespan_ns == bound_ns; }
  double gap_fraction() const {
    return bound_ns == 0
               ? 0.0
               : static_cast<double>(makespan_ns - bound_ns) / static_cast<double>(bound_ns);
  }
};

struct SolveOptions {
  /// Good enough, in millionths of the bound: the search stops at the first such order.
  int64_t tolerance_ppm = 2000;
  /// Good enough, absolute; the larger of the two counts. A fraction of a short segment is nothing.
  int64_t tolerance_ns = 0;
  /// Labels kept per state in the widest heuristic pass; 0: no search, fixed and greedy alone.
  int beam = 8;
  /// If the beams did not suffice: the exact search, whose end proves the optimum.
  bool exact = true;
  /// With more chain operators than this, runs of one resource are searched as one operator first.
  int fuse_above_ops = 40;
  /// With more pairs of layers with communication than this, and their order free, the first pass
  /// goes window by window.
  int window_layers = 4;
  /// Work limit of all searches together; deterministic, unlike a deadline. About 0.2 us and 200
  /// bytes each.
  int64_t max_labels = 200'000;
  /// Wall time for the call; the best order so far is returned when it is over. 0: none. Orders may
  /// then differ between ranks, which is harmless exactly if comm_order is given.
  int64_t deadline_ns = 0;
};

/// Returns: the best order found and a bound that proves how good it is; never worse than the
/// fixed order and the greedy one.
/// Throws: InternalError as check_instance().
/// Source: docs/design.md, "Dual-batch schedules".
DualBatchSchedule solve(const DualBatchInstance& instance, const SolveOptions& options = {});

/// The hand-made order of DualPipe: communication in pinned order (or comm_order), compute as that
/// needs it, weight gradients right behind their operator, rebuilds right before theirs.
std::vector<ScheduleItem> fixed_order(const DualBatchInstance& instance);

/// No overlap: the whole backward, with each rebuild and weight gradient beside its operator, then
/// the whole forward. Ignores comm_order.
std::vector<ScheduleItem> sequential_order(const DualBatchInstance& instance);

}  // namespace bagualu
