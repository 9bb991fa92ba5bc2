#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/provision/policy.h"

namespace bagualu {

/// What the rest of a micro-batch will hold at most.
struct Prediction {
  int64_t peak_bytes = 0;       ///< from now on; older peaks do not count
  int64_t host_peak_bytes = 0;  ///< from now on
};

/// Predicts the rest of a micro-batch by replaying the very actions that the rank would execute.
///
/// A point is a position in the order of operators: forward op i is point i, backward op i is point
/// 2 * ops - 1 - i. Actions before an operator (rebuilding, reloading) belong to its point.
/// Threads: none; scratch is reused between calls.
class Predictor {
 public:
  explicit Predictor(const ProvisionContext& context);

  /// Sets the bytes to these loads; cheap when few layers changed.
  void set_loads(const std::vector<LayerLoad>& loads);
  const std::vector<LayerLoad>& loads() const { return loads_; }
  const MemoryTable& table() const { return table_; }
  const LoadDependence& dependence() const { return dependence_; }

  /// Requires: `plan` keeps the past choices of `input.state`.
  Prediction predict(const GateInput& input, const Plan& plan);
  /// As predict(), and fills the highest live bytes of every point (0 where nothing happens).
  Prediction profile(const GateInput& input, const Plan& plan, std::vector<int64_t>& high_by_point);

  /// True if, after running to the next gate under `plan`, the survival plan can carry every layer
  /// beyond `input.gate` at its worst case within both budgets, with the other micro-batches in
  /// flight at the least they can be brought to.
  bool survives_worst_case(const GateInput& input, const Plan& plan);

  bool fits(const Prediction& prediction) const;
  /// Bytes over the device budget, 0 if it fits.
  int64_t excess_bytes(const Prediction& prediction) const;

 private:
  void build_rest(const GateInput& input, const Plan& plan);
  MemoryReplay start_of(const GateInput& input) const;
  void replay_rest(const GateInput& input, const Plan& plan, const MemoryTable& table,
                   MemoryReplay& replay);

  const ProvisionContext& context_;
  const Graph& graph_;
  LoadDependence dependence_;
  Plan survival_;
  std::vector<LayerLoad> loads_;
  MemoryTable table_;
  MemoryTable balanced_table_;
  MemoryTable worst_table_;
  MicrobatchState state_;
  Timeline timeline_;
  std::vector<int64_t> high_by_action_;
  Timeline span_;
};

}  // namespace bagualu
