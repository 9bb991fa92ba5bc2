// One micro-batch in one stage: its state, and the operators that work on it. Operators are spread
// over executor_attention.cpp, executor_mlp.cpp, executor_moe.cpp and executor_comm.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/runtime/executor.h"
#include "bagualu/runtime/pending_comm.h"

namespace bagualu {

/// What all micro-batches of an executor share.
struct ExecutorShared {
  const ModelSpec& spec;
  const ExecutorOptions options;
  ModelState& model;
  Communicator& ep;
  Communicator* pp;
  at::ScalarType dtype;
  at::Tensor rope_cos, rope_sin;
  bool capture = false;
  at::Tensor captured;
};

/// Which part of an operator's backward runs (graph.h, Note [Split backward]).
enum class BackwardPart { kWhole, kInput };

class MicrobatchContext {
 public:
  MicrobatchContext(ExecutorShared& shared, const ExecutorMemory& memory);

  void open(const ExecutorStage& stage, const MicrobatchInput& input);
  void set_plan(const Plan& plan) { plan_ = plan; }
  void run(const Action& action);
  MicrobatchResult close();
  void abandon_communication() noexcept { issued_.clear(); }
  void abort() noexcept;

  bool is_open() const { return graph_ != nullptr; }
  const Graph& graph() const { return *graph_; }
  const LayerRouting& routing(int layer) const;
  const ActivationStore& store() const { return store_; }
  /// Times of the communication that the last kForwardEnd or kBackwardEnd awaited.
  const CommTimes& last_comm() const { return last_comm_; }
  /// "forward layer2.dispatch of micro-batch 3".
  std::string text(const Action& action) const;

 private:
  struct PieceBuffers;
  struct Issued {
    int op = -1;
    bool backward = false;
    std::vector<int> storages;  ///< lent to it
    PendingComm pending;
  };

  void run_action(const Action& action);
  void forward(int op, bool recompute);
  void backward(int op, BackwardPart part);
  void weight_grad(int op);
  void weight_grad_of_experts(const OpSpec& op);

  void forward_attention(const OpSpec& op);
  void backward_attention(const OpSpec& op, BackwardPart part);
  void forward_mlp(const OpSpec& op, bool recompute);
  void backward_mlp(const OpSpec& op, BackwardPart part);
  void forward_moe(const OpSpec& op);
  void backward_moe(const OpSpec& op, BackwardPart part);
  void forward_router(const OpSpec& op);
  void forward_dispatch_pack(const OpSpec& op);
  void forward_experts(const OpSpec& op);
  void backward_experts(const OpSpec& op, BackwardPart part);
  void forward_lm_head(const OpSpec& op, bool recompute);
  void backward_lm_head(const OpSpec& op);

  void issue(const OpSpec& op, bool backward);
  PendingComm issue_exchange(const OpSpec& op, bool backward, const at::Tensor& source,
                             at::Tensor& target);
  PendingComm issue_transfer(const OpSpec& op, bool backward, const at::Tensor& source,
                             at::Tensor& target);
  void end(int op, bool backward);

  // The weights of a layer of this stage's graph.
  LayerWeights& layer(int local) const { return shared_.model.layer(model_layer(local)); }
  int model_layer(int local) const { return graph_->first_layer + local; }
  // A storage of the graph, made and put into the store.
  at::Tensor make(int storage, at::IntArrayRef shape, at::ScalarType dtype);
  void adopt(int storage, at::Tensor tensor);
  at::Tensor get(int storage) const { return store_.get(storage); }
  at::Tensor scratch(at::IntArrayRef shape, at::ScalarType dtype) const;
  // The gradient of an operator's output, before its dropout. If the weight gradient comes later
  // and this gradient would be gone by then (d_hidden is updated in place), in a storage of its
  // own.
  at::Tensor output_gradient(const OpSpec& op, int site, BackwardPart part);
  // The gradient that outlives a split backward; -1 if there is none.
  int deferred_storage(const OpSpec& op) const;
  bool materialised(int storage) const;
  uint64_t dropout_seed(int local_layer, int site) const;
  double dropout() const { return input_.train ? spec_.dropout : 0.0; }

  ExecutorShared& shared_;
  const ModelSpec& spec_;
  const ExecutorOptions& options_;
  const at::ScalarType dtype_;
  ActivationStore store_;

  ExecutorStage stage_;
  const Graph* graph_ = nullptr;  ///< none: closed
  int64_t tokens_ = 0;
  MicrobatchInput input_;
  Plan plan_;
  bool recomputing_ = false;
  std::vector<std::optional<LayerRouting>> routing_;
  std::vector<StorageInfo> storage_infos_;
  std::vector<Issued> issued_;
  MicrobatchLosses losses_;
  ExpertTimes expert_times_;
  CommTimes last_comm_;
};

}  // namespace bagualu
