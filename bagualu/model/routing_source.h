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
/// summed over the iteration's micro-batches.
struct RoutingShape {
  /// "paper", "balanced", "hot-expert-set", "hot-rank", "spread-hot", "ragged-source", "zero-load",
  /// "rotating-hot-spot", "burst", "cold-router", "fitted"
  std::string kind = "paper";
  uint64_t seed = 0;
  double calm_fraction = 0.971;  ///< of iterations below calm_limit
  double calm_limit = 1.2;
  double largest = 2.6;
  double autocorrelation = 0;  ///< lag 1, of the iterations' factors
  /// Mean factor of each layer over that of the hottest; empty: alike.
  std::vector<double> layer_profile;
  /// Relative standard deviation of a micro-batch's factor around its iteration's.
  double microbatch_spread = 0.03;
  /// "fitted": quantiles of the iterations' factors at 0, 1/(n-1), ..., 1; drawn from in between.
  std::vector<double> quantiles;
};

/// Kinds that make_routing_source() knows.
const std::vector<std::string>& routing_kinds();

/// Throws: InvalidInput(where, field) for an unknown kind (listing those known), fractions outside
///         0..1, limits that contradict each other.
RoutingShape routing_shape_from_json(const Json& object, const std::string& where);
Json to_json(const RoutingShape& shape);
std::unique_ptr<RoutingSource> make_routing_source(const RoutingShape& shape);

struct RoutingTrace;
/// A trace's iterations, over again after the last. Its ranks are those of one expert group; a trace
/// per expert is folded onto the group's ranks. Replicas start at different iterations of it.
/// Throws: InvalidInput(where, field) if the trace has fewer ranks or layers than the group.
std::unique_ptr<RoutingSource> recorded_source(RoutingTrace trace, const RoutingGroup& group,
                                               const std::string& where);

/// The shape "fitted" that makes iterations like the trace's: quantiles, lag-1 autocorrelation,
/// layer profile, micro-batch spread. Requires: a trace with records.
RoutingShape fit_routing(const RoutingTrace& trace);

}  // namespace bagualu
