// The executor: runs the actions of a Timeline on tensors, in their order. Start here to see what an
// operator really does; which bytes exist when is not decided here.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
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
/// Both leave the router's mathematics in place.
struct RoutingOverride {
  std::vector<std::optional<Spike>> spikes;           ///< by layer; empty = none
  std::vector<std::vector<int64_t>> tokens_per_expert;  ///< recorded counts by layer; empty = none
};

struct MicrobatchInput {
  int64_t step = 0;
  int64_t microbatch = 0;
  at::Tensor ids;      ///< int64 [T]
  at::Tensor targets;  ///< int64 [T]
  const RoutingOverride* routing = nullptr;
  uint64_t dropout_seed = 0;
  double loss_scale = 1.0;         ///< of the summed cross entropy's gradient
  double router_loss_scale = 1.0;  ///< of the router losses' gradient
  bool train = true;               ///< false: dropout is off
};

struct MicrobatchLosses {
  double cross_entropy_sum = 0.0;
  double aux = 0.0;  ///< summed over layers, coefficient included
  double z = 0.0;
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
};

/// Called after every action with its duration; for profiles and memory pictures.
using ActionObserver = std::function<void(const Action& action, int64_t duration_ns)>;

/// Runs micro-batches of one graph on one rank.
/// Requires: every referenced object outlives it.
/// Ensures: losses and gradients are the same bits for every timeline of the graph.
/// Threads: one thread at a time; the copies of the store run beside it.
class Executor {
 public:
  Executor(const Graph& graph, const ModelSpec& spec, const ExecutorOptions& options,
           ModelState& model, Communicator& ep_group, ActivationStore& store);

  void begin(const MicrobatchInput& input);
  /// Runs timeline[begin, end) under the plan it was built with.
  /// Throws: OutOfBudget, PeerLost, DeadlineExceeded; the micro-batch must then be aborted.
  void run(const Timeline& timeline, size_t begin, const Plan& plan);
  /// Closes the micro-batch. Requires: forward ran; every storage was freed.
  MicrobatchLosses finish(ActivationStoreStats& stats);
  void abort() noexcept;

  /// Requires: the gate of this layer has been run.
  const LayerRouting& routing(int layer) const { return *routing_[layer]; }

  void set_observer(ActionObserver observer) { observer_ = std::move(observer); }
  /// Keeps a copy of the next micro-batch's log-probabilities [T, V] for take_log_probs().
  void capture_log_probs() { capture_ = true; }
  at::Tensor take_log_probs() { return std::exchange(captured_, {}); }

  /// Time spent in the parts of the experts' forward since begin(): what rebuilding one part costs.
  struct ExpertTimes {
    int64_t fc1_ns = 0, act_ns = 0, fc2_ns = 0;
  };
  const ExpertTimes& expert_times() const { return expert_times_; }

 private:
  struct PieceBuffers;

  void run_action(const Action& action);
  // A step of the store that takes device memory.
  void move_storage(const Action& action, void (ActivationStore::*move)(int));
  void forward(int op, bool recompute);
  void backward(int op);

  void forward_attention(const OpSpec& op);
  void backward_attention(const OpSpec& op);
  void forward_mlp(const OpSpec& op, bool recompute);
  void backward_mlp(const OpSpec& op);
  void forward_moe(const OpSpec& op);
  void backward_moe(const OpSpec& op);
  void forward_router(const OpSpec& op);
  void forward_dispatch_pack(const OpSpec& op);
  void forward_experts(const OpSpec& op);
  void backward_experts(const OpSpec& op);
  void forward_lm_head(const OpSpec& op, bool recompute);
  void backward_lm_head(const OpSpec& op);

  // A storage of the graph, made and put into the store.
  at::Tensor make(int storage, at::IntArrayRef shape, at::ScalarType dtype);
  void adopt(int storage, at::Tensor tensor);
  at::Tensor get(int storage) const { return store_.get(storage); }
  at::Tensor scratch(at::IntArrayRef shape, at::ScalarType dtype) const;
  // d_hidden as the gradient of an operator's output, before its dropout.
  at::Tensor masked_gradient(int d_hidden, int layer, int site) const;
  bool materialised(int storage) const;
  uint64_t dropout_seed(int layer, int site) const;
  double dropout() const { return input_.train ? spec_.dropout : 0.0; }

  const Graph& graph_;
  const ModelSpec& spec_;
  const ExecutorOptions options_;
  ModelState& model_;
  Communicator& ep_group_;
  ActivationStore& store_;
  const int64_t tokens_;
  const at::ScalarType dtype_;
  at::Tensor rope_cos_, rope_sin_;
  std::vector<StorageInfo> storage_infos_;

  MicrobatchInput input_;
  const Plan* plan_ = nullptr;
  bool recomputing_ = false;
  std::vector<std::optional<LayerRouting>> routing_;
  MicrobatchLosses losses_;
  ExpertTimes expert_times_;
  ActionObserver observer_;
  bool capture_ = false;
  at::Tensor captured_;
};

}  // namespace bagualu
