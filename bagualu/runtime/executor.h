// The executor: runs the actions of a rank's timeline on tensors, in their order. Start here to see
// what an operator really does; which bytes exist when is not decided here.
//
// Glossary
//   stage     a virtual stage of the model as this rank runs it: a graph and its place.
//   slot      a micro-batch in flight. Its state is a context (executor_context.h): input, losses,
//             routing, storages, what it has issued and not awaited.
// Invariants
//   Losses and gradients are the same bits for every order of actions that respects each
//   micro-batch's own order and the order in which micro-batches add to a gradient.
//   A storage that a communication reads or writes is neither read, nor moved, nor freed before the
//   communication's end (activation_store.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bagualu/graph/graph.h"
#include "bagualu/model/layout.h"
#include "bagualu/model/model_spec.h"
#include "bagualu/runtime/activation_store.h"
#include "bagualu/runtime/communicator.h"
#include "bagualu/runtime/layer_routing.h"
#include "bagualu/runtime/model_state.h"
#include "bagualu/schedule/timeline.h"

namespace bagualu {

/// What the experts of one micro-batch are made to receive, instead of what the router would send.
/// Both leave the router's mathematics in place. Layers are the model's.
struct RoutingOverride {
  std::vector<std::optional<Spike>> spikes;             ///< by layer; empty = none
  std::vector<std::vector<int64_t>> tokens_per_expert;  ///< recorded counts by layer; empty = none
};

struct MicrobatchInput {
  int64_t step = 0;
  int64_t microbatch = 0;
  at::Tensor ids;      ///< int64 [T]; read by a stage with the embedding
  at::Tensor targets;  ///< int64 [T]; read by a stage with the head
  const RoutingOverride* routing = nullptr;
  uint64_t dropout_seed = 0;
  double loss_scale = 1.0;         ///< of the summed cross entropy's gradient
  double router_loss_scale = 1.0;  ///< of the router losses' gradient
  bool train = true;               ///< false: dropout is off
};

struct MicrobatchLosses {
  double cross_entropy_sum = 0.0;  ///< of the stage with the head
  double aux = 0.0;                ///< summed over the stage's layers, coefficient included
  double z = 0.0;
};

/// Time spent in the parts of the experts' forward: what rebuilding one part costs.
struct ExpertTimes {
  int64_t fc1_ns = 0, act_ns = 0, fc2_ns = 0;
};

/// What one micro-batch left behind in one stage.
struct MicrobatchResult {
  MicrobatchLosses losses;
  ActivationStoreStats store;
  ExpertTimes expert_times;
  std::vector<std::optional<LayerRouting>> routing;  ///< by layer of the stage's graph
};

/// The arena refused an allocation of an operator.
class OutOfBudget : public std::runtime_error {
 public:
  OutOfBudget(const std::string& text, int64_t microbatch, int layer, std::string op,
              int64_t wanted_bytes, int64_t left_bytes, int64_t budget_bytes);
  int64_t microbatch;
  int layer;
  std::string op;
  int64_t wanted_bytes, left_bytes, budget_bytes;
};

struct ExecutorOptions {
  int64_t micro_batch_size = 1;
  int64_t seq = 1;
  Dtype dtype = Dtype::kFp32;
  int64_t chunk_rows = 256;
  ActivationStoreOptions store;
};

/// One virtual stage of this rank. The default is a whole model.
struct ExecutorStage {
  const Graph* graph = nullptr;  ///< outlives the executor
  int64_t stage = 0;             ///< among the model's virtual stages
  int64_t stages = 1;            ///< virtual stages of the model
  /// Ranks in the pipeline group that hold the stages before and after; may be this rank. -1: none.
  int64_t previous_rank = -1;
  int64_t next_rank = -1;
};

/// What a rank communicates with. `pp` is read only by stages that have a neighbour.
struct ExecutorGroups {
  Communicator& ep;
  Communicator* pp = nullptr;
};

struct ExecutorMemory {
  DeviceArena& device;
  HostArena& host;
  TransferEngine& transfers;
};

/// Watches the executor. Times are of the steady clock. Calls come from the executing thread.
class ExecutorObserver {
 public:
  virtual ~ExecutorObserver() = default;
  virtual void on_open(int /*slot*/, const ExecutorStage& /*stage*/,
                       const MicrobatchInput& /*input*/) {}
  virtual void on_close(int /*slot*/) {}
  virtual void on_action(const StageAction& /*action*/, int64_t /*begin_ns*/, int64_t /*end_ns*/) {}
  /// A communication was awaited. `action` is the one that issued it; a router's kForward awaits
  /// its exchange of counts itself.
  virtual void on_comm(const StageAction& /*action*/, const CommTimes& /*times*/) {}
  /// A copy was issued for a storage.
  virtual void on_copy(const StageAction& /*action*/, CopyTicket /*ticket*/, int64_t /*bytes*/) {}
};

class MicrobatchContext;
struct ExecutorShared;

/// Runs the micro-batches of one rank.
/// Requires: every referenced object outlives it.
/// Threads:  one thread at a time; copies and communication run beside it.
class Executor {
 public:
  Executor(std::vector<ExecutorStage> stages, const ModelSpec& spec, const ExecutorOptions& options,
           ModelState& model, ExecutorGroups groups, ExecutorMemory memory);
  ~Executor();

  /// Starts a micro-batch of a stage in a slot. Slots are made as needed.
  /// Requires: the slot is free.
  void open(int slot, int stage, const MicrobatchInput& input);
  /// The plan under which the slot's next actions were appended.
  void set_plan(int slot, const Plan& plan);
  /// Runs timeline[begin, end of timeline).
  /// Throws: OutOfBudget, HostOverLimit, PeerLost, DeadlineExceeded, TransferFailed; all open slots
  ///         must then be aborted.
  void run(const RankTimeline& timeline, size_t begin = 0);
  /// The same for one slot alone.
  void run(int slot, const Timeline& timeline, size_t begin = 0);
  /// Ends a micro-batch.
  /// Requires: every storage was freed, every communication awaited.
  MicrobatchResult close(int slot);
  /// Ends every open micro-batch, whatever its state: cancels copies, waits until the backends let
  /// go of the memory, frees all bytes. The executor can then be used again.
  void abort_all() noexcept;

  bool is_open(int slot) const;
  int open_slots() const;
  /// Requires: the slot is open and the gate of this layer of its graph has been run.
  const LayerRouting& routing(int slot, int layer) const;
  /// Requires: the slot was opened before.
  const ActivationStore& store(int slot) const;
  const Graph& graph(int slot) const;

  /// Observers are called in the order in which they were added; each outlives its place here.
  void add_observer(ExecutorObserver* observer) { observers_.push_back(observer); }
  void remove_observer(ExecutorObserver* observer) { std::erase(observers_, observer); }
  /// Keeps a copy of the next micro-batch's log-probabilities [T, V] for take_log_probs().
  void capture_log_probs();
  at::Tensor take_log_probs();

 private:
  MicrobatchContext& context(int slot) const;
  void run_action(const StageAction& action);

  const std::vector<ExecutorStage> stages_;
  std::unique_ptr<ExecutorShared> shared_;
  ExecutorMemory memory_;
  std::vector<std::unique_ptr<MicrobatchContext>> slots_;
  std::vector<ExecutorObserver*> observers_;
};

}  // namespace bagualu
