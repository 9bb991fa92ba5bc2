#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/provision/policy.h"
#include "bagualu/runtime/device_arena.h"
#include "bagualu/runtime/executor.h"
#include "bagualu/schedule/replay.h"

namespace bagualu {

/// One decision as it goes to the log.
struct DecisionRecord {
  int gate = -1;
  int64_t duration_ns = 0;
  bool cache_hit = false;
  bool mitigated = false;
  double load_imbalance = 1.0;
  int64_t needed_bytes = 0;
  int64_t exposed_ns = 0;
  std::vector<int> changed_units;  ///< units this decision gave up, beyond the plan before it
};

/// What one micro-batch did.
/// Units: *_peak_bytes include everything that was live when it began (`base_bytes`).
struct MicrobatchReport {
  MicrobatchLosses losses;
  ActivationStoreStats store;
  Plan plan;  ///< as it was carried out
  std::vector<DecisionRecord> decisions;
  bool repeat_step = false;  ///< some decision asked for it
  int64_t base_bytes = 0;
  int64_t predicted_peak_bytes = 0;  ///< from counts alone; each part before the part ran
  int64_t measured_peak_bytes = 0;
  int64_t host_peak_bytes = 0;
  int64_t unaccounted_bytes = 0;  ///< largest |live bytes - predicted live bytes| between segments
};

/// Live bytes after one action, for the picture of a step.
struct MemorySample {
  int64_t at_ns = 0;
  int64_t live_bytes = 0;
  std::string action;
};

/// Takes one micro-batch through forward and backward: decides at every gate, extends the timeline,
/// predicts its memory, runs it.
/// Requires: the referenced objects outlive it.
class MicrobatchRunner {
 public:
  MicrobatchRunner(const Graph& graph, Executor& executor, DeviceArena& arena, HostArena& host);

  /// `balanced` is the load assumed for layers whose gate has not run.
  /// Throws: as Executor::run; the micro-batch is then aborted and every byte returned.
  MicrobatchReport train(const MicrobatchInput& input, Policy& policy, const LayerLoad& balanced);

  /// Forward only; nothing is kept, no state changes.
  MicrobatchLosses evaluate(const MicrobatchInput& input);

  /// From now on samples are appended to `samples` (nullptr: stop).
  void record_memory(std::vector<MemorySample>* samples);

 private:
  MicrobatchReport train_open(Policy& policy, const LayerLoad& balanced);
  void decide(Policy& policy, int gate, MicrobatchReport& report);
  void run_segment(size_t begin, MicrobatchReport& report);

  const Graph& graph_;
  const LoadDependence dependence_;
  Executor& executor_;
  DeviceArena& arena_;
  HostArena& host_;

  MicrobatchState state_;
  Timeline timeline_;
  Plan plan_;
  std::vector<LayerLoad> loads_;
  MemoryTable table_;
  MemoryReplay memory_;
};

}  // namespace bagualu
