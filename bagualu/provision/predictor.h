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

/// What the backwards of other micro-batches that run between this forward and the next decision
/// take above what is live at the forward's end, at most.
int64_t due_backward_bytes(const GateInput& input);

/// Predicts the rest of a micro-batch by replaying the very actions that the rank would execute.
///
/// A point is a position in the order of operators: forward op i is point i, backward op i is point
/// 2 * ops - 1 - i. Actions before an operator (rebuilding, reloading) belong to its point, what
/// other micro-batches need between forward and backward to the last forward op's. Threads: none;
/// scratch is reused between calls.
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

  /// True if, after running to the next gate under `plan`, the survival plan can carry all that
  /// comes within both budgets: every layer beyond `input.gate` at its worst case, the backwards of
  /// the micro-batches in flight, and new ones at the worst case beside them.
  bool survives_worst_case(const GateInput& input, const Plan& plan);

  bool fits(const Prediction& prediction) const;
  /// Bytes over the device budget, 0 if it fits.
  int64_t excess_bytes(const Prediction& prediction) const;

 private:
  void build_rest(const GateInput& input, const Plan& plan);
  MemoryReplay start_of(const GateInput& input) const;
  void replay_rest(const GateInput& input, const Plan& plan, const MemoryTable& table,
                   MemoryReplay& replay);
  bool survives_ahead(const GateInput& input, const MicrobatchBytes& own, bool more_gates) const;
  bool fits(int64_t device_bytes, int64_t host_bytes) const;

  const ProvisionContext& context_;
  const Graph& graph_;
  LoadDependence dependence_;
  Plan survival_;
  std::vector<LayerLoad> loads_;
  MemoryTable table_;
  MemoryTable balanced_table_;
  MemoryTable worst_table_;
  MicrobatchBytes survival_bytes_;  ///< of a new micro-batch at the worst case
  MicrobatchState state_;
  Timeline timeline_;
  size_t turn_ = 0;  ///< where backward begins in timeline_
  std::vector<int64_t> high_by_action_;
  Timeline span_;
};

}  // namespace bagualu
