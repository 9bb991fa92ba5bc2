#include "bagualu/schedule/dual_batch_instance.h"

#include <algorithm>
#include <array>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/cost/residency_pricing.h"

namespace bagualu {
namespace {

int size_of(const auto& list) { return static_cast<int>(list.size()); }

// Place of a communication in the order that ranks agree on: which pair of MoE layers, and where in
// the pair.
using CommKey = std::array<int, 2>;
constexpr int kBeforeAll = -1;
constexpr int kBehindAll = INT32_MAX;

int count_kind(const Graph& graph, OpKind kind, int begin, int end) {
  return static_cast<int>(std::count_if(graph.ops.begin() + begin, graph.ops.begin() + end,
                                        [kind](const OpSpec& op) { return op.kind == kind; }));
}

CommKey forward_key(const Graph& graph, int op) {
  switch (graph.ops[op].kind) {
    case OpKind::kStageRecv:
      return {kBeforeAll, 0};
    case OpKind::kStageSend:
      return {kBehindAll, 0};
    case OpKind::kCombine:
      return {count_kind(graph, OpKind::kCombine, 0, op), 3};
    default:  // dispatch, and whatever else belongs to it
      return {count_kind(graph, OpKind::kCombine, 0, op), 1};
  }
}

CommKey backward_key(const Graph& graph, int op) {
  const int end = size_of(graph.ops);
  switch (graph.ops[op].kind) {
    case OpKind::kStageSend:
      return {kBeforeAll, 1};
    case OpKind::kStageRecv:
      return {kBehindAll, 1};
    case OpKind::kCombine:
      return {count_kind(graph, OpKind::kCombine, op + 1, end), 0};
    default:
      return {count_kind(graph, OpKind::kCombine, op + 1, end) - 1, 2};
  }
}

// Walks one micro-batch with the appenders of the timeline, so that nothing is said twice about
// what they do, and reads items and copies off the actions.
class Walk {
 public:
  Walk(const SegmentBatch& batch, const SegmentOptions& options, DualBatchSegment& segment)
      : graph_(*batch.graph),
        cost_(*batch.cost),
        loads_(*batch.loads),
        plan_(*batch.plan),
        options_(options),
        segment_(segment),
        instance_(segment.instance),
        state_(*batch.state) {}

 protected:
  const LayerLoad& load(int layer) const { return graph_.load_of(layer, loads_); }

  int64_t bytes(int storage) const {
    const StorageSpec& spec = graph_.storages[storage];
    return spec.bytes.eval(graph_.tokens, load(spec.layer));
  }

  // Appends `op` to the chain: to its last item if both are compute and nothing parts them.
  void add_to_chain(std::vector<ChainOp>& chain, std::vector<std::vector<int>>& ops, int op,
                    int64_t ns) {
    const OpSpec& spec = graph_.ops[op];
    const Resource resource = spec.stream == Stream::kComm ? Resource::kComm : Resource::kCompute;
    const bool joins = options_.fuse && !chain.empty() && resource == Resource::kCompute &&
                       chain.back().resource == resource && !chain.back().host_sync;
    if (!joins) {
      chain.push_back({0, resource, false, spec.layer});
      ops.emplace_back();
    }
    chain.back().ns += ns;
    ops.back().push_back(op);
  }

  const Graph& graph_;
  const CostTable& cost_;
  const std::vector<LayerLoad>& loads_;
  const Plan& plan_;
  const SegmentOptions& options_;
  DualBatchSegment& segment_;
  DualBatchInstance& instance_;
  MicrobatchState state_;
  Timeline timeline_;
};

class ForwardWalk : public Walk {
 public:
  using Walk::Walk;

  void run(int end_op) {
    while (state_.next_op < end_op) {
      const int op = state_.next_op;
      timeline_.clear();
      append_forward_op(graph_, plan_, state_, timeline_);
      step(op, end_op);
    }
    // An offload may be awaited behind the segment only.
    for (CopyOut& copy : instance_.copies_out) {
      if (copy.releases_for_forward >= size_of(instance_.forward)) copy.releases_for_forward = -1;
    }
  }

 private:
  void step(int op, int end_op) {
    const int64_t ns = cost_.forward_ns(graph_, op, load(graph_.ops[op].layer));
    bool ran = false;
    for (const Action& action : timeline_) {
      switch (action.kind) {
        case ActionKind::kForward:
          add_to_chain(instance_.forward, segment_.forward_ops, op, ns);
          ran = true;
          break;
        case ActionKind::kOffload:
          copied_.push_back({action.id, size_of(instance_.copies_out)});
          instance_.copies_out.push_back({transfer_ns(bytes(action.id), cost_.d2h_bytes_per_s),
                                          std::max(0, size_of(instance_.forward) - 1), -1});
          break;
        case ActionKind::kDrain:
          awaited_.push_back(action.id);
          break;
        case ActionKind::kEncode:
          encode_ns_ += transfer_ns(bytes(action.id), cost_.encode_bytes_per_s);
          break;
        default:
          break;
      }
      if (ran) charge_encodings();
    }
    release(op, end_op);
  }

  void charge_encodings() { instance_.forward.back().ns += std::exchange(encode_ns_, 0); }

  // What the operator behind a drain waits for. Inside an item: the next item, since copies are
  // awaited between items only.
  void release(int op, int end_op) {
    for (int storage : std::exchange(awaited_, {})) {
      for (const auto& [copied, index] : copied_) {
        if (copied != storage) continue;
        CopyOut& copy = instance_.copies_out[index];
        copy.releases_for_forward =
            std::max(size_of(instance_.forward) - 1, copy.source_forward + 1);
      }
    }
    if (graph_.ops[op].kind == OpKind::kRouter && op + 1 < end_op) {
      instance_.forward.back().host_sync = true;
    }
  }

  std::vector<std::pair<int, int>> copied_;  // storage, index of its copy
  std::vector<int> awaited_;
  int64_t encode_ns_ = 0;
};

class BackwardWalk : public Walk {
 public:
  using Walk::Walk;

  void run(const BackwardSegment& backward) {
    split_ = backward.split;
    fill_ = backward.split && backward.fill;
    const std::vector<int> waiting = state_.weight_grads;
    while (!state_.backward_done() && next() >= backward.last_op) step(next());
    if (fill_) add_waiting(waiting);
    sort_copies();
  }

 private:
  int next() const {
    if (state_.in_backward) return state_.next_backward;
    int op = size_of(graph_.ops) - 1;
    while (op >= 0 && !graph_.ops[op].has_backward) --op;
    return op;
  }

  void step(int op) {
    const std::vector<int> dropped = dropped_by(op);
    const size_t before = state_.weight_grads.size();
    timeline_.clear();
    append_backward_op(graph_, plan_, split_, state_, timeline_);
    const LayerLoad& at = load(graph_.ops[op].layer);
    const bool deferred = state_.weight_grads.size() > before;
    const int64_t weight_ns = deferred ? weight_grad_ns(cost_, graph_, op, at) : 0;
    const int64_t ns = cost_.backward_ns(graph_, op, at) - weight_ns + pieces_ns(op) + decode_ns();
    const int freed = size_of(instance_.backward) - 1;
    add_to_chain(instance_.backward, segment_.backward_ops, op, ns);
    const int item = size_of(instance_.backward) - 1;
    const bool rebuilds = add_rebuild(item, dropped);
    read_copies(item, freed, rebuilds);
    if (deferred && fill_) add_weight_grad(item, op, weight_ns);
  }

  std::vector<int> dropped_by(int op) const {
    std::vector<int> dropped;
    for (int s : graph_.ops[op].bwd_saved) {
      if (state_.storage[s] == StorageFate::kDropped && !in_pieces(s)) dropped.push_back(s);
    }
    return dropped;
  }

  bool in_pieces(int storage) const {
    const int unit = graph_.storages[storage].unit;
    return unit >= 0 && graph_.units[unit].rebuild == Rebuild::kInPieces;
  }

  int64_t pieces_ns(int op) const {
    int64_t ns = 0;
    for (int s : graph_.ops[op].bwd_saved) {
      if (!in_pieces(s) || is_materialised(graph_, plan_, s)) continue;
      ns += cost_.rebuild[graph_.storages[s].unit].eval(load(graph_.storages[s].layer).rows);
    }
    return ns;
  }

  int64_t decode_ns() const {
    int64_t ns = 0;
    for (const Action& action : timeline_) {
      if (action.kind != ActionKind::kDecode) continue;
      ns += transfer_ns(bytes(action.id), cost_.encode_bytes_per_s);
    }
    return ns;
  }

  bool add_rebuild(int item, const std::vector<int>& dropped) {
    int64_t ns = 0;
    for (const Action& action : timeline_) {
      if (action.kind != ActionKind::kRecompute) continue;
      ns += cost_.forward_ns(graph_, action.id, load(graph_.ops[action.id].layer));
    }
    if (dropped.empty()) return false;
    if (instance_.rebuilds.empty() || instance_.rebuilds.back().before_backward != item) {
      instance_.rebuilds.push_back({0, item});
      segment_.rebuild_storages.emplace_back();
    }
    instance_.rebuilds.back().ns += ns;
    auto& storages = segment_.rebuild_storages.back();
    storages.insert(storages.end(), dropped.begin(), dropped.end());
    return true;
  }

  // Reloads issued before the operator start behind the item before it, those issued at its end
  // behind its own item.
  void read_copies(int item, int before, bool rebuilds) {
    int behind = before;
    int last_recompute = -1;
    for (int a = 0; a < size_of(timeline_); ++a) {
      if (timeline_[a].kind == ActionKind::kRecompute) last_recompute = a;
    }
    for (int a = 0; a < size_of(timeline_); ++a) {
      const Action& action = timeline_[a];
      if (action.kind == ActionKind::kBackward || action.kind == ActionKind::kInputGrad) {
        behind = item;
      } else if (action.kind == ActionKind::kReload) {
        reloads_.push_back({action.id, behind, -1, -1});
      } else if (action.kind == ActionKind::kAwait) {
        const bool feeds = rebuilds && a < last_recompute;
        await(action.id, item, feeds ? size_of(instance_.rebuilds) - 1 : -1);
      }
    }
  }

  void await(int storage, int item, int rebuild) {
    for (Reload& reload : reloads_) {
      if (reload.storage != storage) continue;
      reload.item = item;
      reload.rebuild = rebuild;
    }
  }

  // By fused item, as the chain.
  void add_weight_grad(int item, int op, int64_t ns) {
    if (instance_.weight_grads.empty() || instance_.weight_grads.back().after_backward != item ||
        !options_.fuse) {
      instance_.weight_grads.push_back({0, item});
      segment_.weight_grad_ops.emplace_back();
    }
    instance_.weight_grads.back().ns += ns;
    segment_.weight_grad_ops.back().push_back(op);
  }

  // Weight gradients that were put off before the segment: an instance knows them only behind an
  // operator, so they wait for the first one.
  void add_waiting(const std::vector<int>& waiting) {
    if (waiting.empty() || instance_.backward.empty()) return;
    std::vector<WeightGradFiller> grads;
    std::vector<std::vector<int>> ops;
    for (int op : waiting) {
      grads.push_back({weight_grad_ns(cost_, graph_, op, load(graph_.ops[op].layer)), 0});
      ops.push_back({op});
    }
    instance_.weight_grads.insert(instance_.weight_grads.begin(), grads.begin(), grads.end());
    segment_.weight_grad_ops.insert(segment_.weight_grad_ops.begin(), ops.begin(), ops.end());
  }

  // In order of issue. A reload that something needs no sooner than the reload behind it is needed:
  // the engine runs them one by one, so the earlier one is there as soon.
  void sort_copies() {
    int item = size_of(instance_.backward) - 1;
    int rebuild = size_of(instance_.rebuilds);
    std::vector<CopyIn> copies;
    for (auto reload = reloads_.rbegin(); reload != reloads_.rend(); ++reload) {
      if (reload->item < 0) continue;  // for a later segment
      item = std::min(item, reload->item);
      if (reload->rebuild >= 0) rebuild = std::min(rebuild, reload->rebuild);
      copies.push_back({transfer_ns(bytes(reload->storage), cost_.h2d_bytes_per_s), item,
                        reload->rebuild >= 0 ? rebuild : -1, std::min(reload->behind, item - 1)});
    }
    instance_.copies_in.assign(copies.rbegin(), copies.rend());
  }

  struct Reload {
    int storage = -1;
    int behind = -1;   // item that ends before it starts
    int item = -1;     // that awaits it
    int rebuild = -1;  // that awaits it
  };

  bool split_ = true;
  bool fill_ = true;
  std::vector<Reload> reloads_;
};

void pin_communication(const ForwardSegment& forward, const BackwardSegment& backward,
                       DualBatchSegment& segment) {
  std::vector<std::pair<CommKey, ScheduleItem>> keyed;
  const DualBatchInstance& instance = segment.instance;
  for (int i = 0; i < size_of(instance.forward); ++i) {
    if (instance.forward[i].resource != Resource::kComm) continue;
    keyed.push_back({forward_key(*forward.batch.graph, segment.forward_ops[i].front()),
                     {ItemKind::kForward, i}});
  }
  for (int i = 0; i < size_of(instance.backward); ++i) {
    if (instance.backward[i].resource != Resource::kComm) continue;
    keyed.push_back({backward_key(*backward.batch.graph, segment.backward_ops[i].front()),
                     {ItemKind::kBackward, i}});
  }
  std::stable_sort(keyed.begin(), keyed.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [key, item] : keyed) segment.instance.comm_order.push_back(item);
}

const ChainOp* chain_op(const DualBatchInstance& instance, const ScheduleItem& item) {
  if (item.kind == ItemKind::kForward) return &instance.forward[item.index];
  return item.kind == ItemKind::kBackward ? &instance.backward[item.index] : nullptr;
}

int weight_grads_of(const DualBatchInstance& instance, const ScheduleItem& item) {
  if (item.kind != ItemKind::kBackward) return 0;
  return static_cast<int>(std::count_if(
      instance.weight_grads.begin(), instance.weight_grads.end(),
      [&item](const WeightGradFiller& grad) { return grad.after_backward == item.index; }));
}

// Whether the item at `at` is a communication that may be issued before the one ahead of it.
bool may_move_up(const DualBatchInstance& instance, const std::vector<ScheduleItem>& order,
                 size_t at) {
  const ScheduleItem &comm = order[at], &ahead = order[at - 1];
  const ChainOp* op = chain_op(instance, comm);
  if (op == nullptr || op->resource != Resource::kComm || op->host_sync) return false;
  const ChainOp* other = chain_op(instance, ahead);
  if (comm.kind == ahead.kind || (other != nullptr && other->resource == Resource::kComm)) {
    return false;
  }
  const bool backward = comm.kind == ItemKind::kBackward;
  int pending = 0;  // before the item ahead
  for (size_t i = 0; i + 1 < at; ++i) {
    pending += weight_grads_of(instance, order[i]) - (order[i].kind == ItemKind::kWeightGrad);
  }
  switch (ahead.kind) {
    case ItemKind::kWeightGrad:
      return pending <= instance.weight_lag &&
             !(backward && instance.weight_grads[ahead.index].after_backward == comm.index);
    case ItemKind::kRebuild:
      if (backward && instance.rebuilds[ahead.index].before_backward == comm.index) return false;
      [[fallthrough]];
    default:
      return pending + weight_grads_of(instance, comm) <= instance.weight_lag;
  }
}

}  // namespace

int64_t weight_grad_ns(const CostTable& cost, const Graph& graph, int op, const LayerLoad& load) {
  return graph.ops[op].has_wgrad ? cost.backward_ns(graph, op, load) / 2 : 0;
}

DualBatchSegment make_segment(const ForwardSegment& forward, const BackwardSegment& backward,
                              const SegmentOptions& options) {
  DualBatchSegment segment;
  segment.instance.weight_lag = options.weight_lag;
  segment.instance.rebuild_lead = options.rebuild_lead;
  if (forward.batch.graph != nullptr) {
    ForwardWalk(forward.batch, options, segment).run(forward.end_op);
  }
  if (backward.batch.graph != nullptr) {
    BackwardWalk(backward.batch, options, segment).run(backward);
  }
  pin_communication(forward, backward, segment);
  check_instance(segment.instance);
  return segment;
}

std::vector<SegmentStep> segment_steps(const DualBatchSegment& segment,
                                       const std::vector<ScheduleItem>& order) {
  const std::vector<std::vector<int>>* lists[] = {&segment.forward_ops, &segment.backward_ops,
                                                  &segment.weight_grad_ops,
                                                  &segment.rebuild_storages};
  std::vector<SegmentStep> steps;
  for (const ScheduleItem& item : order) {
    for (int id : (*lists[static_cast<int>(item.kind)])[item.index]) {
      steps.push_back({item.kind, id});
    }
  }
  return steps;
}

std::vector<ScheduleItem> communication_first(const DualBatchInstance& instance,
                                              const std::vector<ScheduleItem>& order) {
  std::vector<ScheduleItem> result = order;
  for (size_t i = 1; i < result.size(); ++i) {
    for (size_t at = i; at > 0 && may_move_up(instance, result, at); --at) {
      std::swap(result[at], result[at - 1]);
    }
  }
  return result;
}

}  // namespace bagualu
