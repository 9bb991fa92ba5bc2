// One rank's training: parameters, optimizer, and the micro-batches of a step under a policy.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/model/model_spec.h"
#include "bagualu/runtime/communicator.h"
#include "bagualu/runtime/executor.h"
#include "bagualu/runtime/model_state.h"
#include "bagualu/runtime/pipeline_runner.h"
#include "bagualu/runtime/step_recorder.h"
#include "bagualu/runtime/trainer_options.h"
#include "bagualu/runtime/trainer_stages.h"
#include "bagualu/runtime/transfer_cpu.h"

namespace bagualu {

/// The budget is below what any routing may need.
class BudgetBelowFloor : public std::runtime_error {
 public:
  BudgetBelowFloor(int64_t budget_bytes, int64_t floor_bytes, const std::string& what_would_fit);
  int64_t budget_bytes, floor_bytes;
  int64_t missing_bytes() const { return floor_bytes - budget_bytes; }
};

/// What a step is made of besides its tokens.
struct StepInput {
  at::Tensor tokens;  ///< int64 [microbatches, B, S + 1]
  int64_t step = 0;   ///< from 0
  double lr = 0.0;
  std::vector<RoutingOverride> routing;  ///< by micro-batch; empty = natural
  bool want_memory = false;
  std::string trace_path;  ///< where the step's trace is appended; empty = nowhere
  bool stop_requested = false;
};

/// Live bytes after one action, for the picture of a step.
struct MemorySample {
  int64_t at_ns = 0;
  int64_t live_bytes = 0;
  std::string action;
};

struct StepReport {
  PassesReport passes;            ///< micro-batches by stage and number
  std::vector<double> imbalance;  ///< by layer of the model, rows summed over the micro-batches
  std::vector<MemorySample> memory;
  std::optional<StepTimes> times;  ///< with pairs of passes, several stages, or a trace
  double loss = 0.0, aux_loss = 0.0, z_loss = 0.0;  ///< means over all ranks
  double grad_norm = 0.0;
  bool stop = false;  ///< some rank asked to stop
  /// Some rank's policy asked to run the step again: it was, on every rank, with full recompute.
  /// Everything here is of the second run, peaks and times of both.
  bool repeated = false;
  std::vector<MicrobatchReport> discarded;  ///< the first run's micro-batches, if repeated
  int64_t begin_ns = 0, passes_end_ns = 0, end_ns = 0;  ///< steady clock
  std::vector<PassBytes> pass_bytes;  ///< of both runs, if repeated
  int64_t end_bytes = 0;
  int64_t host_end_bytes = 0;
  int64_t predicted_peak_bytes = 0;
  int64_t measured_peak_bytes = 0;
  int64_t comm_ns = 0;
};

/// One rank of the job.
/// Invariants: after step(), evaluate() or an exception from them, the device arena holds what it
///             held before (static_bytes) and the host arena nothing.
/// Throws:  step() and evaluate(): OutOfBudget, PeerLost, DeadlineExceeded.
class Trainer {
 public:
  /// Throws: BudgetBelowFloor before any large allocation; InvalidInput.
  Trainer(const ModelSpec& spec, const TrainerOptions& options, const TrainerGroups& groups);
  ~Trainer();

  ModelState& model() { return model_; }
  StepReport step(const StepInput& input);
  /// Mean cross entropy over all ranks. Shapes: tokens int64 [n, B, S + 1].
  double evaluate(const at::Tensor& tokens);
  /// Log-probabilities [B, S, V] of the next token. Shapes: tokens int64 [b, s], b <= B, s <= S.
  /// Requires: one pipeline rank with one stage.
  at::Tensor log_probs(const at::Tensor& tokens);

  /// The virtual stages that this rank holds, in the model's order.
  const std::vector<std::unique_ptr<TrainerStage>>& stages() const { return stages_; }
  const TrainerOptions& options() const { return options_; }
  const MemoryForecast& forecast() const { return forecast_; }
  const Json& profile() const { return profile_; }
  /// The plan `policy` starts a micro-batch with, and its predicted peak.
  Json plan_json();

  /// Changes the policy between steps (comparisons in one process). Same numbers under each.
  void set_policy(const std::string& name, const PolicyOptions& options, int64_t budget_bytes);

 private:
  class Watch;

  void ensure_policy();
  void set_policies(const std::string& name, const PolicyOptions& options);
  const RankProgram& program(int64_t microbatches);
  PipelineRunner::InputOf inputs(const StepInput& input, bool train);
  void run_microbatches(const StepInput& input, StepReport& report);
  void repeat_microbatches(const StepInput& input, StepReport& report);
  void count_routing(const StepReport& report);
  bool reduce_gradients(const StepInput& input, StepReport& report);
  bool reduce_losses(const StepInput& input, double dense_square, double expert_square,
                     StepReport& report);
  double reduce_over_stages(double dense_square, StepReport& report);
  void apply_gradients(const StepInput& input, StepReport& report);
  void update_router_biases();
  Json measure_profile();
  void adamw(ModelState::Group& group, ParameterGroup which, int64_t step, double lr);

  const ModelSpec spec_;
  const TrainerOptions options_;
  std::vector<std::unique_ptr<TrainerStage>> stages_;
  RankProgram program_;
  int64_t program_microbatches_ = 0;
  LayerLoad balanced_, worst_case_;
  MemoryForecast forecast_;
  DeviceArena& arena_;
  Communicator ep_, dp_, edp_, pp_, world_, embedding_;
  ModelState model_;
  HostArena host_;
  CpuTransferEngine transfers_;
  Executor executor_;
  PipelineRunner runner_;
  std::vector<at::Tensor> ids_, targets_;  ///< int64 [T] by slot, refilled for every micro-batch
  at::Tensor reduced_;                     ///< fp64, scalars that every rank sums
  at::Tensor expert_counts_;  ///< fp64 [MoE layers held, E], tokens per expert of this step
  at::Tensor imbalance_;      ///< fp64 [layers], with more than one pipeline rank

  Json profile_;
  std::string policy_name_;
  PolicyOptions policy_options_;
  int64_t budget_bytes_ = 0;
  int64_t policy_base_bytes_ = -1;  ///< what was live when the policies were made
  std::vector<std::vector<int64_t>> step_rows_per_rank_;  ///< by layer of the model
  std::string trace_path_;
  std::unique_ptr<StepTraceWriter> trace_writer_;  ///< of trace_path_
};

}  // namespace bagualu
