#include "bagualu/graph/graph.h"

#include <algorithm>
#include <array>

#include "bagualu/base/error.h"

namespace bagualu {

int64_t Workspace::eval(int64_t tokens, const LayerLoad& load) const {
  int64_t largest = 0;
  for (const auto& phase : phases) {
    int64_t sum = 0;
    for (const ByteFormula& buffer : phase) sum += buffer.eval(tokens, load);
    largest = std::max(largest, sum);
  }
  return largest + hidden_bytes;
}

namespace {

template <class T>
int find_by_name(const std::vector<T>& items, std::string_view name) {
  for (size_t i = 0; i < items.size(); ++i) {
    if (items[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

bool contains(const std::vector<int>& ids, int id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

// A forward may only read what an earlier forward created, a backward only what a forward created
// (saved) or a backward of a later op created (gradient).
void check_order(const Graph& graph) {
  std::vector<char> exists(graph.storages.size(), 0);
  for (const OpSpec& op : graph.ops) {
    for (int s : op.reads) BGL_CHECK(exists[s], op.name, graph.storages[s].name);
    for (int s : op.creates) {
      BGL_CHECK(!exists[s], op.name, graph.storages[s].name);
      exists[s] = 1;
    }
  }
  for (auto op = graph.ops.rbegin(); op != graph.ops.rend(); ++op) {
    for (int s : op->bwd_saved) {
      BGL_CHECK(exists[s] && graph.storages[s].unit >= 0, op->name, graph.storages[s].name);
    }
    for (int s : op->bwd_creates) {
      BGL_CHECK(!exists[s], op->name, graph.storages[s].name);
      exists[s] = 1;
    }
    for (int s : op->bwd_reads) BGL_CHECK(exists[s], op->name, graph.storages[s].name);
  }
}

// Note [Split backward]: between an input gradient and its weight gradient other backward ops run,
// so nothing that the weight gradient reads may be updated in place by one of them. A saved storage
// never is, except by its own op; a gradient is safe if no op further down reads it, or if it is a
// copy of its own.
void check_weight_grad(const Graph& graph, int op_index) {
  const OpSpec& op = graph.ops[op_index];
  BGL_CHECK(op.has_backward && !op.wgrad_saved.empty(), op.name);
  for (int s : op.wgrad_saved) {
    BGL_CHECK(contains(op.bwd_saved, s), op.name, graph.storages[s].name);
  }
  for (int s : op.wgrad_reads) {
    const StorageSpec& storage = graph.storages[s];
    BGL_CHECK(contains(op.bwd_reads, s) || contains(op.bwd_creates, s), op.name, storage.name);
    BGL_CHECK(graph.last_backward_read[s] == op_index, op.name, storage.name);
  }
}

void check_split_backward(const Graph& graph) {
  for (int i = 0; i < static_cast<int>(graph.ops.size()); ++i) {
    const OpSpec& op = graph.ops[i];
    if (op.has_wgrad) check_weight_grad(graph, i);
    BGL_CHECK(op.has_wgrad || (op.wgrad_saved.empty() && op.wgrad_reads.empty()), op.name);
  }
  for (size_t s = 0; s < graph.storages.size(); ++s) {
    const StorageSpec& storage = graph.storages[s];
    if (!storage.deferred_only) continue;
    const OpSpec& op = graph.ops[storage.producer];
    const int id = static_cast<int>(s);
    BGL_CHECK(storage.kind == StorageKind::kGradient && storage.unit < 0, storage.name);
    BGL_CHECK(contains(op.bwd_creates, id) && contains(op.wgrad_reads, id), storage.name);
    BGL_CHECK(!contains(op.bwd_reads, id), storage.name, "read where it need not exist");
    for (const OpSpec& other : graph.ops) {
      BGL_CHECK(&other == &op || !contains(other.bwd_reads, id), storage.name, other.name);
    }
  }
}

// Note [Recompute order]: backward runs downwards, so the saved inputs of a producer must live until
// the outputs' last backward reader, which is at or above the inputs' own last reader. An unsaved
// input is made again by its own producer, which asks the same of its inputs; that producer may be
// neither a collective nor a router.
class ClosureCheck {
 public:
  ClosureCheck(const Graph& graph, const UnitSpec& unit) : graph_(graph), unit_(unit) {
    first_last_read_ = static_cast<int>(graph.ops.size());
    for (int s : unit.storages) {
      first_last_read_ = std::min(first_last_read_, graph.last_backward_read[s]);
    }
  }

  void visit(int op) {
    if (contains(seen_, op)) return;
    seen_.push_back(op);
    for (int in : graph_.ops[op].reads) {
      const StorageSpec& input = graph_.storages[in];
      if (input.unit >= 0) {
        BGL_CHECK(graph_.last_backward_read[in] <= first_last_read_, unit_.name, input.name);
        continue;
      }
      const OpSpec& producer = graph_.ops[input.producer];
      BGL_CHECK(producer.stream == Stream::kCompute && producer.kind != OpKind::kRouter, unit_.name,
                input.name, "not saved, and cannot be made again");
      visit(input.producer);
    }
  }

 private:
  const Graph& graph_;
  const UnitSpec& unit_;
  int first_last_read_ = 0;
  std::vector<int> seen_;
};

void check_units(const Graph& graph) {
  for (size_t u = 0; u < graph.units.size(); ++u) {
    const UnitSpec& unit = graph.units[u];
    BGL_CHECK(!unit.storages.empty(), unit.name);
    for (int s : unit.storages) {
      BGL_CHECK(graph.storages[s].unit == static_cast<int>(u), unit.name);
      BGL_CHECK(graph.storages[s].producer == unit.producer, unit.name);
      BGL_CHECK(graph.last_backward_read[s] >= 0, unit.name, "saved but read by no backward");
      if (graph.storages[s].persistent) {
        BGL_CHECK(unit.pinned && graph.storages[s].bytes == ByteFormula{}, unit.name);
      }
    }
    if (unit.rebuild != Rebuild::kOp) continue;
    ClosureCheck(graph, unit).visit(unit.producer);
  }
}

}  // namespace

void Graph::finalize() {
  last_forward_read.assign(storages.size(), -1);
  last_backward_read.assign(storages.size(), -1);
  for (int i = 0; i < static_cast<int>(ops.size()); ++i) {
    const OpSpec& op = ops[i];
    for (int s : op.creates) {
      storages[s].producer = i;
      last_forward_read[s] = i;
    }
    for (int s : op.reads) last_forward_read[s] = i;
  }
  for (int i = static_cast<int>(ops.size()) - 1; i >= 0; --i) {
    for (const auto* list : {&ops[i].bwd_saved, &ops[i].bwd_reads, &ops[i].bwd_creates,
                             &ops[i].wgrad_saved, &ops[i].wgrad_reads}) {
      for (int s : *list) last_backward_read[s] = i;
    }
    for (int s : ops[i].bwd_creates) storages[s].producer = i;
  }
  for (UnitSpec& unit : units) {
    unit.producer = storages[unit.storages.front()].producer;
    for (int s : unit.storages) BGL_CHECK(contains(ops[unit.producer].creates, s), unit.name);
  }
  check_order(*this);
  check_units(*this);
  check_split_backward(*this);
}

int Graph::find_unit(std::string_view name) const { return find_by_name(units, name); }
int Graph::find_op(std::string_view name) const { return find_by_name(ops, name); }
int Graph::find_storage(std::string_view name) const { return find_by_name(storages, name); }

const LayerLoad& Graph::load_of(int layer, const std::vector<LayerLoad>& loads) const {
  static constexpr LayerLoad kNone;
  return layer < 0 ? kNone : loads[layer];
}

int64_t Graph::unit_bytes(int unit, const LayerLoad& load) const {
  int64_t bytes = 0;
  for (int s : units[unit].storages) bytes += storages[s].bytes.eval(tokens, load);
  return bytes;
}

std::vector<int64_t> Graph::storage_bytes(const std::vector<LayerLoad>& loads) const {
  std::vector<int64_t> bytes(storages.size());
  for (size_t s = 0; s < storages.size(); ++s) {
    bytes[s] = storages[s].bytes.eval(tokens, load_of(storages[s].layer, loads));
  }
  return bytes;
}

std::string_view op_kind_name(OpKind kind) {
  static constexpr std::array<std::string_view, 41> kNames = {
      "embedding",  "attn_norm", "qkv",      "qk_norm",         "core_attn",  "attn_proj",
      "mlp_norm",   "router",    "dispatch_pack", "dispatch",   "dispatch_unpack", "experts",
      "combine",    "combine_unpack", "shared_fc1", "shared_act", "shared_fc2", "mlp_fc1",
      "mlp_act",    "mlp_fc2",   "final_norm", "lm_head",
      "stage_recv", "stage_send", "q_down",   "q_norm",    "q_up",      "kv_down",   "kv_norm",
      "kv_up",      "k_norm",    "q_rope",    "k_rope",    "attn_bda",  "expert_fc1", "moe_act",
      "expert_fc2", "mlp_bda",   "loss",      "cast",      "row_cast"};
  return kNames[static_cast<size_t>(kind)];
}

}  // namespace bagualu
