#include "bagualu/runtime/executor_context.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/runtime/executor_sites.h"
#include "bagualu/runtime/ops/dropout.h"
#include "bagualu/runtime/seeds.h"

namespace bagualu {
namespace {

bool is_attention(OpKind kind) { return kind >= OpKind::kAttnNorm && kind <= OpKind::kAttnProj; }
bool is_moe(OpKind kind) { return kind >= OpKind::kRouter && kind <= OpKind::kCombineUnpack; }

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

MicrobatchContext::MicrobatchContext(ExecutorShared& shared, const ExecutorMemory& memory)
    : shared_(shared),
      spec_(shared.spec),
      options_(shared.options),
      dtype_(shared.dtype),
      store_(memory.device, memory.host, memory.transfers, shared.options.store) {}

void MicrobatchContext::open(const ExecutorStage& stage, const MicrobatchInput& input) {
  BGL_CHECK(!is_open(), input.microbatch, input_.microbatch);
  const Graph& graph = *stage.graph;
  std::vector<StorageInfo> infos;
  for (const StorageSpec& storage : graph.storages) infos.push_back({storage.name, storage.layer});
  store_.begin(input.step, input.microbatch, std::move(infos));
  stage_ = stage;
  tokens_ = graph.tokens;
  input_ = input;
  losses_ = {};
  expert_times_ = {};
  routing_.assign(graph.layers, std::nullopt);
  graph_ = &graph;
}

MicrobatchResult MicrobatchContext::close() {
  BGL_CHECK(is_open(), input_.microbatch);
  BGL_CHECK(issued_.empty(), issued_.front().pending.label(), "was not awaited");
  MicrobatchResult result;
  result.store = store_.finish();
  result.losses = losses_;
  result.expert_times = expert_times_;
  result.routing = std::move(routing_);
  graph_ = nullptr;
  input_ = {};
  return result;
}

void MicrobatchContext::abort() noexcept {
  issued_.clear();  // waits until the backend has let go of the memory
  store_.abort();
  graph_ = nullptr;
  input_ = {};
}

const LayerRouting& MicrobatchContext::routing(int layer) const {
  BGL_CHECK(is_open() && routing_.at(layer).has_value(), layer);
  return *routing_[layer];
}

std::string MicrobatchContext::text(const Action& action) const {
  return fmt::format("{} of micro-batch {}", action_text(*graph_, action), input_.microbatch);
}

void MicrobatchContext::run(const Action& action) {
  try {
    run_action(action);
  } catch (const OverBudget& over) {
    const int layer =
        names_op(action.kind) ? graph_->ops[action.id].layer : graph_->storages[action.id].layer;
    throw OutOfBudget(over.what(), input_.microbatch, layer >= 0 ? model_layer(layer) : layer,
                      action_text(*graph_, action), over.wanted_bytes(), over.left_bytes(),
                      over.budget_bytes());
  }
}

void MicrobatchContext::run_action(const Action& action) {
  switch (action.kind) {
    case ActionKind::kForward:
      return forward(action.id, false);
    case ActionKind::kRecompute:
      return forward(action.id, true);
    case ActionKind::kBackward:
      return backward(action.id, BackwardPart::kWhole);
    case ActionKind::kInputGrad:
      return backward(action.id, BackwardPart::kInput);
    case ActionKind::kWeightGrad:
      return weight_grad(action.id);
    case ActionKind::kForwardEnd:
      return end(action.id, false);
    case ActionKind::kBackwardEnd:
      return end(action.id, true);
    case ActionKind::kFree:
      return store_.release(action.id);
    case ActionKind::kDrop:
      return store_.drop(action.id);
    case ActionKind::kOffload:
      return store_.offload(action.id);
    case ActionKind::kDrain:
      return store_.drain(action.id);
    case ActionKind::kReload:
      return store_.reload(action.id);
    case ActionKind::kAwait:
      return store_.await(action.id);
    case ActionKind::kEncode:
      return store_.encode(action.id);
    case ActionKind::kDecode:
      return store_.decode(action.id);
    case ActionKind::kGate:
      return;  // the caller decides between segments
  }
  throw InternalError("unknown action");
}

void MicrobatchContext::forward(int index, bool recompute) {
  const OpSpec& op = graph_->ops[index];
  BGL_CHECK(!recompute || op.stream == Stream::kCompute, op.name);
  recomputing_ = recompute;
  if (op.stream == Stream::kComm) {
    issue(op, false);
  } else if (is_attention(op.kind)) {
    forward_attention(op);
  } else if (is_moe(op.kind)) {
    forward_moe(op);
  } else {
    forward_mlp(op, recompute);
  }
}

void MicrobatchContext::backward(int index, BackwardPart part) {
  const OpSpec& op = graph_->ops[index];
  BGL_CHECK(part == BackwardPart::kWhole || op.has_wgrad, op.name);
  recomputing_ = false;
  if (op.stream == Stream::kComm) {
    issue(op, true);
  } else if (is_attention(op.kind)) {
    backward_attention(op, part);
  } else if (is_moe(op.kind)) {
    backward_moe(op, part);
  } else {
    backward_mlp(op, part);
  }
}

at::Tensor MicrobatchContext::make(int storage, at::IntArrayRef shape, at::ScalarType dtype) {
  at::Tensor tensor = at::empty(shape, dtype);
  adopt(storage, tensor);
  return tensor;
}

void MicrobatchContext::adopt(int storage, at::Tensor tensor) {
  const StorageSpec& spec = graph_->storages[storage];
  const LayerLoad load =
      spec.layer >= 0 && routing_[spec.layer] ? routing_[spec.layer]->load : LayerLoad{};
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

at::Tensor MicrobatchContext::scratch(at::IntArrayRef shape, at::ScalarType dtype) const {
  return at::empty(shape, dtype);
}

bool MicrobatchContext::materialised(int storage) const {
  return is_materialised(*graph_, plan_, storage);
}

uint64_t MicrobatchContext::dropout_seed(int local_layer, int site) const {
  return mix_seed(mix_seed(input_.dropout_seed, model_layer(local_layer)), site);
}

int MicrobatchContext::deferred_storage(const OpSpec& op) const {
  for (int s : op.bwd_creates) {
    if (graph_->storages[s].deferred_only) return s;
  }
  return -1;
}

at::Tensor MicrobatchContext::output_gradient(const OpSpec& op, int site, BackwardPart part) {
  const at::Tensor gradient = get(op.bwd_reads[0]);
  const bool masks = site != kMasked && dropout() != 0.0;
  const int kept = part == BackwardPart::kInput ? deferred_storage(op) : -1;
  if (!masks && kept < 0) return gradient;
  at::Tensor result =
      kept >= 0 ? make(kept, gradient.sizes(), dtype_) : scratch(gradient.sizes(), dtype_);
  if (masks) {
    ops::dropout_backward(gradient, dropout(), dropout_seed(op.layer, site), result);
  } else {
    result.copy_(gradient);
  }
  return result;
}

}  // namespace bagualu
