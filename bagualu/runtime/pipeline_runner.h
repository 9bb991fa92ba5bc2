#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bagualu/provision/rank_driver.h"
#include "bagualu/runtime/communicator.h"
#include "bagualu/runtime/device_arena.h"
#include "bagualu/runtime/executor.h"
#include "bagualu/runtime/step_recorder.h"

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

/// What one micro-batch did in one virtual stage.
/// Units: *_peak_bytes are the rank's while one of its passes ran, with everything that was live
///        when the step began (`base_bytes`).
struct MicrobatchReport {
  int stage = 0;  ///< index of the rank's stages
  int64_t microbatch = 0;
  MicrobatchLosses losses;
  ActivationStoreStats store;
  ExpertTimes expert_times;
  std::vector<std::optional<LayerRouting>> routing;  ///< by layer of the stage's graph
  Plan plan;                                         ///< as it was carried out
  std::vector<DecisionRecord> decisions;
  bool repeat_step = false;  ///< some decision asked for it
  int64_t base_bytes = 0;
  int64_t predicted_peak_bytes = 0;  ///< from counts alone; each part before the part ran
  int64_t measured_peak_bytes = 0;
  int64_t host_peak_bytes = 0;
  int64_t unaccounted_bytes = 0;  ///< largest |live - predicted live| between segments
};

/// A pass, or a pair that ran as one: with everything that was live when the step began.
struct PassBytes {
  int64_t peak_bytes = 0;
  int64_t live_bytes = 0;  ///< at its end
};

/// What a rank did in one step.
struct PassesReport {
  std::vector<MicrobatchReport> microbatches;  ///< in the order in which they began
  std::vector<PassBytes> pass_bytes;           ///< in the order of the rank's passes
  int overlapped_segments = 0;
  int serialised_segments = 0;
  int deferred_passes = 0;
  int undeferred_passes = 0;
};

/// Takes micro-batches through the passes of a rank: the driver decides and predicts, the executor
/// computes.
/// Requires: the referenced objects outlive it.
class PipelineRunner final : private RankHost {
 public:
  /// `ep_group`: whose ranks vote on overlap.
  PipelineRunner(Executor& executor, DeviceArena& arena, HostArena& host, Communicator& ep_group);
  ~PipelineRunner() override;

  /// By stage of the rank, in the executor's order. To be called again when a policy or a budget
  /// has changed.
  void set_stages(std::vector<RankStage> stages, const RankOptions& options);

  /// Decisions and votes are noted there from now on; nullptr: nowhere.
  void set_recorder(StepRecorder* recorder) { recorder_ = recorder; }

  /// Input of a micro-batch in a stage; `slot` stays its own until it is over.
  using InputOf = std::function<MicrobatchInput(int slot, int stage, int64_t microbatch)>;

  /// Throws: as Executor::run(); every micro-batch is then aborted and every byte returned.
  PassesReport train(const RankProgram& program, const InputOf& input_of);

  /// Forward only, micro-batch by micro-batch; nothing is kept, no state changes.
  /// Returns: the losses, summed.
  MicrobatchLosses evaluate(int64_t microbatches, const InputOf& input_of);

 private:
  void open(int slot, int stage, int microbatch) override;
  void run(const RankTimeline& actions) override;
  GateCounts counts(int slot, int layer) override;
  bool agree(bool mine) override;
  void close(int slot) override;
  void begin_pass(const PipelinePass& pass, const PipelinePass* beside) override;
  void end_pass(const PipelinePass& pass, const PipelinePass* beside) override;
  void deciding() override;
  void decided(RankDecision& made) override;

  int stage_index(int stage) const;
  MicrobatchReport& report_of(const PipelinePass& pass);
  MicrobatchReport& report_of(int stage, int microbatch);
  void finish_reports(const RankRun& run);
  MicrobatchLosses evaluate_microbatch(int64_t microbatch, const InputOf& input_of);

  Executor& executor_;
  DeviceArena& arena_;
  HostArena& host_;
  Communicator& ep_group_;
  std::vector<RankStage> stages_;
  std::vector<Plan> evaluation_plans_;
  std::unique_ptr<RankDriver> driver_;

  StepRecorder* recorder_ = nullptr;
  const InputOf* input_of_ = nullptr;
  PassesReport report_;
  struct Slot {
    int stage = -1;
    int64_t microbatch = -1;
  };
  std::vector<Slot> slots_;
  int64_t base_bytes_ = 0;
  int64_t unaccounted_bytes_ = 0;  ///< of the running pass
  int64_t decision_begin_ns_ = 0;
};

}  // namespace bagualu
