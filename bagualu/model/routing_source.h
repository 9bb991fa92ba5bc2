// Routing of a job that is only simulated: how many rows every rank of an expert group receives, by
// iteration, layer and micro-batch. Recorded (a RoutingTrace), or made up by a RoutingShape.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/base/json.h"

namespace bagualu {

/// One expert group: the ranks that share one copy of the experts of some layers.
struct RoutingGroup {
  int64_t layers = 0;         ///< with experts, of the whole model
  int64_t microbatches = 1;   ///< of one step
  int64_t ranks = 1;          ///< ep * etp
  int64_t balanced_rows = 0;  ///< of a rank, layer and micro-batch
  int64_t largest_rows = 0;   ///< that any routing can cause on a rank
  int64_t replicas = 1;       ///< groups like this one in the job: one of them reaches its factor
};

/// Threads:    any number at once.
/// Invariants: what a call returns depends on its arguments and the source alone (random numbers
///             are functions of seed, iteration, replica and place), on every compiler and thread
///             count the same.
class RoutingSource {
 public:
  virtual ~RoutingSource() = default;
  virtual std::string_view name() const = 0;
  /// Rows of one replica in one iteration: rows[(microbatch * layers + layer) * ranks + rank]. The
  /// ranks' rows of a layer in a micro-batch add up to ranks * balanced_rows, none above
  /// largest_rows. `rows` is resized.
  virtual void rows(int64_t iteration, int64_t replica, const RoutingGroup& group,
                    std::vector<int32_t>* rows) const = 0;
};

/// Statistics of an iteration's imbalance: over layers the largest of (hottest rank / mean), rows
/// summed over the iteration's micro-batches. docs/formats.md (Routing shape) has the kinds.
///
/// "paper" and "fitted": the job's factor of an iteration has the wanted distribution and
/// autocorrelation. One replica, drawn anew, reaches it; the others have what independent replicas
/// have whose hottest one is at this factor. In a replica one layer, drawn anew, reaches the
/// replica's factor and the others stay below; a layer has one hot rank, the other ranks share the
/// rest within 5 % of the mean. Factors that a group cannot show (above its ranks, or
/// largest_rows) are cut.
struct RoutingShape {
  /// "paper", "balanced", "hot-expert-set", "hot-rank", "spread-hot", "ragged-source", "zero-load",
  /// "rotating-hot-spot", "burst", "cold-router", "fitted"
  std::string kind = "paper";
  uint64_t seed = 0;
  double calm_fraction = 0.971;  ///< of iterations below calm_limit
  double calm_limit = 1.2;
  double largest = 2.6;
  double autocorrelation = 0;  ///< lag 1, of the iterations' factors, 0 to 0.95
  /// Mean factor of each layer over that of the hottest, in (0, 1]; empty: alike. Stretched or
  /// pressed to the layers of the group.
  std::vector<double> layer_profile;
  /// A layer's excess over 1 is that of the iteration's hottest layer times a uniform draw between
  /// 1 - layer_spread and 1 (before the profile). The paper does not say; ours.
  double layer_spread = 0.5;
  /// Share of layers whose hot rank is the replica's hot rank of the iteration; the others draw
  /// their own. 1: the rows of all layers meet on one rank, the worst for memory. Ours.
  double rank_agreement = 1;
  /// Relative standard deviation of a micro-batch's factor around its iteration's.
  double microbatch_spread = 0.03;
  /// "fitted": quantiles of the iterations' factors at 0, 1/(n-1), ..., 1; drawn from in between.
  std::vector<double> quantiles;

  bool operator==(const RoutingShape&) const = default;
};

/// Kinds that make_routing_source() knows.
const std::vector<std::string>& routing_kinds();

/// "format" and "version" may be left out.
/// Throws: InvalidInput(where, field) for an unknown kind (listing those known), fractions outside
///         0..1, limits that contradict each other, keys that are unknown.
RoutingShape routing_shape_from_json(const Json& object, const std::string& where);
Json to_json(const RoutingShape& shape);
/// Throws: InvalidInput("routing", field) as above.
std::unique_ptr<RoutingSource> make_routing_source(const RoutingShape& shape);

struct RoutingTrace;
/// A trace's iterations, over again after the last. Its ranks are those of one expert group; a
/// trace per expert is folded onto the group's ranks; if it has n times the group's ranks, n
/// replicas each take one part. Later replicas start at other iterations; micro-batches past the
/// last wrap round. Cells with another sum than the group's are scaled; a cell with a rank missing
/// is at the layer's mean of its iteration. Layers in the order of their numbers; those past the
/// group's are not used.
/// Throws: InvalidInput(where, field) if the trace has fewer ranks or layers than the group, or
///         ranks that are no multiple of the group's.
std::unique_ptr<RoutingSource> recorded_source(RoutingTrace trace, const RoutingGroup& group,
                                               const std::string& where);

/// The shape "fitted" that makes iterations like the trace's: quantiles, lag-1 autocorrelation,
/// layer profile and spread, agreement of the layers' hot ranks, micro-batch spread. Time without a
/// trend: a cold start is fitted as if it could come at any time.
/// Requires: a trace with records; ranks of an expert trace are its experts.
RoutingShape fit_routing(const RoutingTrace& trace);

}  // namespace bagualu
