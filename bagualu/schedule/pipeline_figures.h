// Figures of the orders of schedule/pipeline.h without making them, for searches over thousands of
// configurations.
#pragma once

#include <compare>
#include <map>
#include <optional>
#include <vector>

#include "bagualu/schedule/pipeline.h"

namespace bagualu {

/// in_flight(make_order(kind, ...))[rank] without the order; nothing for V-Half, whose counts have
/// no closed form here.
/// Requires: a shape that check_order_shape() takes; 0 <= rank < pp.
/// Cost:     a few ns
std::optional<int> closed_in_flight(PipelineKind kind, int pp, int virtual_per_rank,
                                    int microbatches, int rank);

/// Makespan of make_order(kind, ...) when every pass of a kind takes the same time, without the
/// order. Exact where it is given:
///   send_ns = 0; 1F1B any count, interleaved multiples of pp, ZB-H1 from pp, ZB-H2 and ZB-V from
///   2 pp - 1, DualPipeV from 2 pp and DualPipe even counts from 2 pp micro-batches; ZB-V only if
///   all three times are equal; ZB-H2 only if input_grad or weight_grad takes no longer than
///   forward; both DualPipes only if weight_grad <= input_grad
///   and forward <= input_grad + weight_grad.
/// Work is microbatches * (F + I + W) times the virtual stages per rank; with q = pp - 1 there is
/// more of it by q (F + I + W) for 1F1B and interleaved, q max(F, I, F + I - W) for ZB-H1,
/// q max(F, F + I - 2 W) for ZB-H2, q F for ZB-V, and max(k (F + I - W), k (2 I - W) - F) for
/// DualPipeV with k = q and DualPipe with k = pp / 2 - 1.
/// Source:   Narayanan et al. 2021; Qi et al. 2023, Table 2; DualPipe's figures are ours and lower
///           than the published ones, which let a forward and a backward that overlap end together.
std::optional<int64_t> closed_makespan_ns(PipelineKind kind, int pp, int virtual_per_rank,
                                          int microbatches, const PassTimes& times);

/// Longest span of a rank (which counts where ranks need not wait for each other between steps)
/// under the same conditions; ZB-H1's is work + q max(I, F + I - W), ZB-H2's work +
/// q max(0, F + I - 2 W), ZB-V's the work itself, the others' the makespan.
std::optional<int64_t> closed_span_ns(PipelineKind kind, int pp, int virtual_per_rank,
                                      int microbatches, const PassTimes& times);

struct OrderFigures {
  std::vector<int> in_flight;  ///< by rank
  int64_t makespan_ns = 0;
  int64_t span_ns = 0;         ///< longest of a rank
  double bubble_fraction = 0;  ///< of the makespan, the same on every rank
};

/// Figures of any shape and equal times: by the closed forms where they hold, else from the order,
/// which is then made and simulated once.
/// Threads: one at a time.
class OrderFiguresCache {
 public:
  /// Throws: InvalidInput as make_order(). The reference is good as long as the cache.
  const OrderFigures& of(PipelineKind kind, int pp, int virtual_per_rank, int microbatches,
                         const PassTimes& times);

 private:
  struct Key {
    PipelineKind kind;
    int pp;
    int virtual_per_rank;
    int microbatches;
    PassTimes times;
    auto operator<=>(const Key&) const = default;
  };
  std::map<Key, OrderFigures> figures_;
};

}  // namespace bagualu
