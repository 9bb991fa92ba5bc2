#include "bagualu/runtime/executor.h"

#include <ATen/ATen.h>

#include <chrono>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/runtime/ops/dropout.h"
#include "bagualu/runtime/ops/rope.h"
#include "bagualu/runtime/seeds.h"

namespace bagualu {
namespace {

int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

}  // namespace

OutOfBudget::OutOfBudget(const std::string& text, int64_t microbatch, int layer, std::string op,
                         int64_t wanted_bytes, int64_t left_bytes, int64_t budget_bytes)
    : std::runtime_error(text),
      microbatch(microbatch),
      layer(layer),
      op(std::move(op)),
      wanted_bytes(wanted_bytes),
      left_bytes(left_bytes),
      budget_bytes(budget_bytes) {}

Executor::Executor(const Graph& graph, const ModelSpec& spec, const ExecutorOptions& options,
                   ModelState& model, Communicator& ep_group, ActivationStore& store)
    : graph_(graph),
      spec_(spec),
      options_(options),
      model_(model),
      ep_group_(ep_group),
      store_(store),
      tokens_(graph.tokens),
      dtype_(options.dtype == Dtype::kBf16 ? at::kBFloat16 : at::kFloat),
      routing_(spec.layers) {
  rope_cos_ = at::empty({options.seq, spec.head_dim}, at::kFloat);
  rope_sin_ = at::empty({options.seq, spec.head_dim}, at::kFloat);
  ops::rope_tables(spec.rope_theta, rope_cos_, rope_sin_);
  for (const StorageSpec& storage : graph.storages) {
    storage_infos_.push_back({storage.name, storage.layer});
  }
}

void Executor::begin(const MicrobatchInput& input) {
  BGL_CHECK(input.ids.numel() == tokens_ && input.targets.numel() == tokens_, input.ids.numel());
  input_ = input;
  losses_ = {};
  expert_times_ = {};
  for (auto& routing : routing_) routing.reset();
  store_.begin(input.step, input.microbatch, storage_infos_);
}

void Executor::run(const Timeline& timeline, size_t begin, const Plan& plan) {
  plan_ = &plan;
  for (size_t i = begin; i < timeline.size(); ++i) {
    const int64_t start = observer_ ? now_ns() : 0;
    run_action(timeline[i]);
    if (observer_) observer_(timeline[i], now_ns() - start);
  }
}

MicrobatchLosses Executor::finish(ActivationStoreStats& stats) {
  stats = store_.finish();
  input_.ids.reset();
  input_.targets.reset();
  return losses_;
}

void Executor::abort() noexcept {
  store_.abort();
  capture_ = false;
  captured_.reset();
  input_.ids.reset();
  input_.targets.reset();
}

void Executor::run_action(const Action& action) {
  switch (action.kind) {
    case ActionKind::kForward:
      return forward(action.id, false);
    case ActionKind::kRecompute:
      return forward(action.id, true);
    case ActionKind::kBackward:
      return backward(action.id);
    case ActionKind::kFree:
      return store_.release(action.id);
    case ActionKind::kDrop:
      return store_.drop(action.id);
    case ActionKind::kOffload:
      return store_.offload(action.id);
    case ActionKind::kDrain:
      return store_.drain(action.id);
    case ActionKind::kReload:
      return move_storage(action, &ActivationStore::reload);
    case ActionKind::kAwait:
      return store_.await(action.id);
    case ActionKind::kEncode:
      return move_storage(action, &ActivationStore::encode);
    case ActionKind::kDecode:
      return move_storage(action, &ActivationStore::decode);
    case ActionKind::kGate:
      return;  // the caller decides between segments
    case ActionKind::kForwardEnd:
    case ActionKind::kBackwardEnd:
      return;  // communication is awaited where it is issued
    case ActionKind::kInputGrad:
    case ActionKind::kWeightGrad:
      break;
  }
  throw InternalError("unknown action");
}

void Executor::move_storage(const Action& action, void (ActivationStore::*move)(int)) {
  try {
    (store_.*move)(action.id);
  } catch (const OverBudget& over) {
    throw OutOfBudget(over.what(), input_.microbatch, graph_.storages[action.id].layer,
                      action_text(graph_, action), over.wanted_bytes(), over.left_bytes(),
                      over.budget_bytes());
  }
}

namespace {

bool is_attention(OpKind kind) { return kind >= OpKind::kAttnNorm && kind <= OpKind::kAttnProj; }
bool is_moe(OpKind kind) { return kind >= OpKind::kRouter && kind <= OpKind::kCombineUnpack; }

}  // namespace

void Executor::forward(int index, bool recompute) {
  const OpSpec& op = graph_.ops[index];
  recomputing_ = recompute;
  try {
    if (is_attention(op.kind)) {
      forward_attention(op);
    } else if (is_moe(op.kind)) {
      forward_moe(op);
    } else {
      forward_mlp(op, recompute);
    }
  } catch (const OverBudget& over) {
    throw OutOfBudget(over.what(), input_.microbatch, op.layer,
                      (recompute ? "recompute " : "forward ") + op.name, over.wanted_bytes(),
                      over.left_bytes(), over.budget_bytes());
  }
}

void Executor::backward(int index) {
  const OpSpec& op = graph_.ops[index];
  recomputing_ = false;
  try {
    if (is_attention(op.kind)) {
      backward_attention(op);
    } else if (is_moe(op.kind)) {
      backward_moe(op);
    } else {
      backward_mlp(op);
    }
  } catch (const OverBudget& over) {
    throw OutOfBudget(over.what(), input_.microbatch, op.layer, "backward " + op.name,
                      over.wanted_bytes(), over.left_bytes(), over.budget_bytes());
  }
}

at::Tensor Executor::make(int storage, at::IntArrayRef shape, at::ScalarType dtype) {
  at::Tensor tensor = at::empty(shape, dtype);
  adopt(storage, tensor);
  return tensor;
}

void Executor::adopt(int storage, at::Tensor tensor) {
  const StorageSpec& spec = graph_.storages[storage];
  const LayerLoad load = spec.layer >= 0 && routing_[spec.layer] ? routing_[spec.layer]->load
                                                                 : LayerLoad{};
  // The graph's bytes are the allocator's, for every storage, in every step.
  BGL_CHECK(spec.bytes.eval(tokens_, load) ==
                round_up(static_cast<int64_t>(tensor.nbytes()), kAllocationGranularity),
            spec.name, tensor.nbytes());
  if (recomputing_) {
    store_.put_recomputed(storage, std::move(tensor));
  } else {
    store_.put(storage, std::move(tensor));
  }
}

at::Tensor Executor::scratch(at::IntArrayRef shape, at::ScalarType dtype) const {
  return at::empty(shape, dtype);
}

bool Executor::materialised(int storage) const { return is_materialised(graph_, *plan_, storage); }

uint64_t Executor::dropout_seed(int layer, int site) const {
  return mix_seed(mix_seed(input_.dropout_seed, layer), site);
}

at::Tensor Executor::masked_gradient(int d_hidden, int layer, int site) const {
  at::Tensor gradient = get(d_hidden);
  if (dropout() == 0.0) return gradient;
  at::Tensor masked = scratch(gradient.sizes(), dtype_);
  ops::dropout_backward(gradient, dropout(), dropout_seed(layer, site), masked);
  return masked;
}

}  // namespace bagualu
