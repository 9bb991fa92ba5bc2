// One rank's training: parameters, optimizer, and the micro-batches of a step under a policy.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bagualu/base/json.h"
#include "bagualu/cost/op_cost.h"
#include "bagualu/graph/native_moe.h"
#include "bagualu/model/layout.h"
#include "bagualu/model/model_spec.h"
#include "bagualu/provision/floor.h"
#include "bagualu/provision/policy.h"
#include "bagualu/runtime/communicator.h"
#include "bagualu/runtime/executor.h"
#include "bagualu/runtime/microbatch_runner.h"
#include "bagualu/runtime/model_state.h"
#include "bagualu/runtime/ops/optimizer.h"
#include "bagualu/runtime/transfer_cpu.h"

namespace bagualu {

/// Everything a run fixes at its start. Units: *_bytes, 0 = no limit.
struct TrainerOptions {
  int64_t rank = 0;
  ParallelLayout layout;
  TrainShape shape;
  uint64_t seed = 0;
  std::string policy = "adaptive";
  PolicyOptions policy_options;
  int64_t budget_bytes = 0;
  int64_t host_budget_bytes = 0;
  int64_t chunk_rows = 256;  ///< rows per expert piece; part of the numerics
  Json profile;              ///< null: measure at the start
  bool allow_quantise = false;
  bool verify_checksums = false;
  ops::AdamwOptions adamw;
  double clip = 0.0;  ///< largest gradient norm; 0 = no clipping

  /// Throws: InvalidInput naming the option.
  static TrainerOptions from_json(const Json& json, const std::string& where);
};

/// {"plan","static_fit_imbalance","threshold","recompute_modules","adapipe_fit_imbalance",
/// "adapipe_in_flight","kwai_offload_ratio","kwai_fit_imbalance","retry_factor"}, all optional.
PolicyOptions policy_options_from_json(const Json& json, const std::string& where);

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
  bool stop_requested = false;
};

struct StepReport {
  std::vector<MicrobatchReport> microbatches;
  std::vector<double> imbalance;            ///< by layer, rows summed over the step's micro-batches
  std::vector<std::vector<int64_t>> rows;   ///< by micro-batch and layer, this rank
  std::vector<MemorySample> memory;
  double loss = 0.0, aux_loss = 0.0, z_loss = 0.0;  ///< means over all ranks
  double grad_norm = 0.0;
  bool stop = false;  ///< some rank asked to stop
  /// Some rank's policy asked to run the step again: it was, on every rank, with full recompute.
  /// Everything here is of the second run, peaks and times of both.
  bool repeated = false;
  std::vector<MicrobatchReport> discarded;  ///< the first run's micro-batches, if repeated
  int64_t end_bytes = 0;
  int64_t host_end_bytes = 0;
  int64_t predicted_peak_bytes = 0;
  int64_t measured_peak_bytes = 0;
  int64_t comm_ns = 0;
};

/// Device and host bytes a rank needs, before anything is allocated.
struct MemoryForecast {
  int64_t static_bytes = 0;  ///< parameters, gradients, optimizer, tables, one step's tokens
  int64_t floor_bytes = 0;   ///< static_bytes + the survival plan at the worst routing
  int64_t host_floor_bytes = 0;
  int64_t calm_peak_bytes = 0;        ///< static_bytes + save-all at even routing
  int64_t worst_save_all_bytes = 0;   ///< static_bytes + save-all at the worst routing
  std::string floor_at;
};

/// One rank of the job.
/// Invariants: after step(), evaluate() or an exception from them, the device arena holds what it
///             held before (static_bytes) and the host arena nothing.
/// Throws:  step() and evaluate(): OutOfBudget, PeerLost, DeadlineExceeded.
class Trainer {
 public:
  /// Group names as torch.distributed knows them; "" for a group of one.
  /// Throws: BudgetBelowFloor before any large allocation; InvalidInput.
  Trainer(const ModelSpec& spec, const TrainerOptions& options, const std::string& ep_group,
          const std::string& dp_group, const std::string& edp_group);
  ~Trainer();

  ModelState& model() { return model_; }
  StepReport step(const StepInput& input);
  /// Mean cross entropy over all ranks. Shapes: tokens int64 [n, B, S + 1].
  double evaluate(const at::Tensor& tokens);
  /// Log-probabilities [B, S, V] of the next token. Shapes: tokens int64 [b, s], b <= B, s <= S.
  at::Tensor log_probs(const at::Tensor& tokens);

  const Graph& graph() const { return graph_; }
  const TrainerOptions& options() const { return options_; }
  const MemoryForecast& forecast() const { return forecast_; }
  const Json& profile() const { return profile_; }
  /// The plan `policy` starts a micro-batch with, and its predicted peak.
  Json plan_json();

  /// Changes the policy between steps (comparisons in one process). Same numbers under each.
  void set_policy(const std::string& name, const PolicyOptions& options, int64_t budget_bytes);

 private:
  void ensure_policy();
  MicrobatchInput microbatch_input(const StepInput& input, int64_t microbatch);
  void run_microbatches(const StepInput& input, Policy& policy, StepReport& report);
  void repeat_microbatches(const StepInput& input, StepReport& report);
  bool reduce_gradients(const StepInput& input, StepReport& report);
  void apply_gradients(const StepInput& input, StepReport& report);
  bool reduce_losses(const StepInput& input, double expert_square, StepReport& report,
                     double& expert_square_sum);
  void update_router_biases();
  void count_routing(StepReport& report);
  Json measure_profile();
  void adamw(ModelState::Group& group, ParameterGroup which, int64_t step, double lr);

  const ModelSpec spec_;
  const TrainerOptions options_;
  Graph graph_;
  LayerLoad balanced_, worst_case_;
  MemoryForecast forecast_;
  DeviceArena& arena_;
  Communicator ep_, dp_, edp_;
  ModelState model_;
  HostArena host_;
  CpuTransferEngine transfers_;
  ActivationStore store_;
  Executor executor_;
  MicrobatchRunner runner_;
  at::Tensor ids_, targets_;  ///< int64 [T], refilled for every micro-batch
  at::Tensor reduced_;        ///< fp64, scalars that every rank sums
  at::Tensor expert_counts_;  ///< fp64 [MoE layers, E], tokens per expert of this step

  Json profile_;
  CostTable cost_;
  std::string policy_name_;
  PolicyOptions policy_options_;
  int64_t budget_bytes_ = 0;
  int64_t policy_base_bytes_ = -1;  ///< what was live when policy_ was made
  ProvisionContext context_;
  std::unique_ptr<Policy> policy_;
  std::vector<std::vector<int64_t>> step_rows_per_rank_;  ///< by layer
};

/// A layer's load when routing is even, and when it is as uneven as it can be.
LayerLoad balanced_load(const ModelSpec& spec, const TrainerOptions& options);
LayerLoad bounding_load(const ModelSpec& spec, const TrainerOptions& options);
NativeGraphOptions graph_options(const TrainerOptions& options);
/// The graph of a run, with the measured scratch of attention.
Graph trainer_graph(const ModelSpec& spec, const TrainerOptions& options);
MemoryForecast forecast_of(const Graph& graph, const ModelSpec& spec,
                           const TrainerOptions& options);

/// The forecast of a rank, from its options alone (measures ATen's attention scratch).
MemoryForecast memory_forecast(const ModelSpec& spec, const TrainerOptions& options);

}  // namespace bagualu
