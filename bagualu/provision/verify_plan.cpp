#include "bagualu/provision/verify_plan.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <string_view>

#include "bagualu/base/units.h"
#include "bagualu/cost/residency.h"

namespace bagualu {
namespace {

class Simulation {
 public:
  Simulation(const Graph& graph, const Plan& plan, const std::vector<LayerLoad>& loads,
             VerifiedPlan& result)
      : graph_(graph), plan_(plan), loads_(loads), result_(result), place_(graph.storages.size()) {}

  void run() {
    const int ops = static_cast<int>(graph_.ops.size());
    for (int i = 0; i < ops; ++i) forward(i);
    for (size_t s = 0; s < place_.size(); ++s) {
      if (place_[s] == Place::kLeaving) place_[s] = Place::kHost;
    }
    for (int i = ops - 1; i >= 0; --i) backward(i);
  }

 private:
  enum class Place { kNowhere, kDevice, kLeaving, kHost, kEncoded, kInPieces, kLost };

  const LayerLoad& load(int layer) const {
    static const LayerLoad kNone;
    return layer < 0 ? kNone : loads_[static_cast<size_t>(layer)];
  }

  static int64_t charged(const ByteFormula& f, int64_t tokens, const LayerLoad& load) {
    const int64_t bytes = f.fixed + f.per_token * tokens + f.per_row * load.rows +
                          f.per_piece_row * load.piece_rows;
    return (bytes + kAllocationGranularity - 1) / kAllocationGranularity * kAllocationGranularity;
  }

  int64_t bytes_of(int s) const {
    const StorageSpec& spec = graph_.storages[s];
    return charged(spec.bytes, graph_.tokens, load(spec.layer));
  }

  Retire fate(int s) const {
    const int unit = graph_.storages[s].unit;
    return unit < 0 ? Retire::kKeep : residencies()[plan_.residency[unit]].retire;
  }

  bool never_whole(int s) const {
    const int unit = graph_.storages[s].unit;
    return unit >= 0 && graph_.units[unit].rebuild == Rebuild::kInPieces &&
           fate(s) == Retire::kDrop;
  }

  int64_t encoded(int s) const {
    const ResidencySpec& spec = residencies()[plan_.residency[graph_.storages[s].unit]];
    return round_up(spec.device_bytes(bytes_of(s), graph_.storages[s].lossy_element_bytes),
                    kAllocationGranularity);
  }

  // Everything on the device now, added up from nothing.
  int64_t resident() const {
    int64_t sum = 0;
    for (int s = 0; s < static_cast<int>(place_.size()); ++s) {
      if (place_[s] == Place::kDevice || place_[s] == Place::kLeaving) sum += bytes_of(s);
      if (place_[s] == Place::kEncoded) sum += encoded(s);
    }
    return sum;
  }

  void note(int64_t extra) {
    result_.peak_bytes = std::max(result_.peak_bytes, resident() + extra);
  }

  int64_t scratch(const Workspace& workspace, int layer) const {
    int64_t most = 0;
    for (const auto& phase : workspace.phases) {
      int64_t sum = 0;
      for (const ByteFormula& f : phase) sum += charged(f, graph_.tokens, load(layer));
      most = std::max(most, sum);
    }
    return most + workspace.hidden_bytes;
  }

  int64_t piece_buffers(const std::vector<int>& storages) const {
    int64_t sum = 0;
    for (int s : storages) {
      const StorageSpec& spec = graph_.storages[s];
      if (never_whole(s)) sum += charged(spec.piece_bytes, graph_.tokens, load(spec.layer));
    }
    return sum;
  }

  bool read_later_in_forward(int s, int i) const {
    for (size_t j = static_cast<size_t>(i) + 1; j < graph_.ops.size(); ++j) {
      const auto& reads = graph_.ops[j].reads;
      if (std::find(reads.begin(), reads.end(), s) != reads.end()) return true;
    }
    return false;
  }

  // Smallest op whose backward touches s, -1 if none.
  int last_backward(int s) const {
    for (int i = 0; i < static_cast<int>(graph_.ops.size()); ++i) {
      const OpSpec& op = graph_.ops[i];
      for (const auto* list : {&op.bwd_saved, &op.bwd_reads, &op.bwd_creates}) {
        if (std::find(list->begin(), list->end(), s) != list->end()) return i;
      }
    }
    return -1;
  }

  // An offload may take until the second of these marks that follows it.
  void mark() {
    for (size_t s = 0; s < place_.size(); ++s) {
      if (place_[s] == Place::kLeaving && ++marks_[s] == 2) place_[s] = Place::kHost;
    }
  }

  void forward(int i) {
    const OpSpec& op = graph_.ops[i];
    if (op.kind == OpKind::kAttnNorm || op.kind == OpKind::kFinalNorm) mark();
    for (int s : op.creates) place_[s] = never_whole(s) ? Place::kInPieces : Place::kDevice;
    note(scratch(op.fwd_workspace, op.layer) + piece_buffers(op.creates));
    std::set<int> touched(op.reads.begin(), op.reads.end());
    touched.insert(op.creates.begin(), op.creates.end());
    // Encoding needs both copies for a moment, one storage after the other, as the op lists them.
    for (const auto* list : {&op.reads, &op.creates}) {
      for (int s : *list) {
        if (touched.erase(s) > 0 && !read_later_in_forward(s, i)) end_of_forward_use(s);
      }
    }
    if (op.kind == OpKind::kRouter) mark();
  }

  void end_of_forward_use(int s) {
    if (place_[s] != Place::kDevice) return;
    if (graph_.storages[s].unit < 0) {
      place_[s] = Place::kNowhere;
      return;
    }
    switch (fate(s)) {
      case Retire::kKeep:
        return;
      case Retire::kDrop:
        place_[s] = Place::kLost;
        return;
      case Retire::kOffload:
        place_[s] = plan_.eager_drain ? Place::kHost : Place::kLeaving;
        marks_[s] = 0;
        return;
      case Retire::kEncode:
        if (graph_.storages[s].lossy_element_bytes == 0) return;
        note(encoded(s));
        place_[s] = Place::kEncoded;
        return;
    }
  }

  void bring(int s) {
    switch (place_[s]) {
      case Place::kDevice:
      case Place::kInPieces:
        return;
      case Place::kHost:
        place_[s] = Place::kDevice;
        note(0);
        return;
      case Place::kEncoded:
        note(bytes_of(s));
        place_[s] = Place::kDevice;
        return;
      case Place::kLost:
        rebuild(graph_.storages[s].producer);
        return;
      default:
        result_.violations.push_back("backward needs " + graph_.storages[s].name +
                                     ", which nothing can bring back");
    }
  }

  void rebuild(int i) {
    const OpSpec& op = graph_.ops[i];
    for (int s : op.reads) bring(s);
    for (int s : op.creates) place_[s] = Place::kDevice;
    note(scratch(op.fwd_workspace, op.layer));
  }

  // On entering a layer, what the next one will need starts to come back.
  void prefetch(int i) {
    const auto& ops = graph_.ops;
    const int layer = ops[i].layer;
    if (i + 1 < static_cast<int>(ops.size()) && ops[i + 1].layer == layer) return;
    int j = i;
    while (j >= 0 && ops[j].layer == layer) --j;
    if (j < 0) return;
    for (const int next = ops[j].layer; j >= 0 && ops[j].layer == next; --j) {
      for (int s : ops[j].bwd_saved) {
        if (place_[s] == Place::kHost) place_[s] = Place::kDevice;
      }
    }
    note(0);
  }

  void backward(int i) {
    const OpSpec& op = graph_.ops[i];
    if (plan_.prefetch) prefetch(i);
    if (!op.has_backward) return;
    for (int s : op.bwd_saved) bring(s);
    for (int s : op.bwd_creates) place_[s] = Place::kDevice;
    note(scratch(op.bwd_workspace, op.layer) + piece_buffers(op.bwd_saved));
    for (const auto* list : {&op.bwd_saved, &op.bwd_reads, &op.bwd_creates}) {
      for (int s : *list) {
        if (last_backward(s) == i) place_[s] = Place::kNowhere;
      }
    }
  }

  const Graph& graph_;
  const Plan& plan_;
  const std::vector<LayerLoad>& loads_;
  VerifiedPlan& result_;
  std::vector<Place> place_;
  std::vector<int> marks_ = std::vector<int>(place_.size(), 0);
};

void check_choices(const Graph& graph, const Plan& plan, std::vector<std::string>& violations) {
  if (plan.residency.size() != graph.units.size()) {
    violations.push_back("the plan has " + std::to_string(plan.residency.size()) +
                         " choices for " + std::to_string(graph.units.size()) + " units");
    return;
  }
  for (size_t u = 0; u < graph.units.size(); ++u) {
    const UnitSpec& unit = graph.units[u];
    if (plan.residency[u] >= residencies().size()) {
      violations.push_back(unit.name + " has no registered residency");
      continue;
    }
    const ResidencySpec& choice = residencies()[plan.residency[u]];
    if (unit.pinned && choice.retire != Retire::kKeep) {
      violations.push_back(unit.name + " is pinned, not to " + std::string(choice.name));
    }
    if (choice.needs_rebuild && unit.rebuild == Rebuild::kNever) {
      violations.push_back(unit.name + " cannot be rebuilt, so " + std::string(choice.name) +
                           " loses it");
    }
  }
}

// Bytes are counted once per storage, and only an original restores what is derived from it.
void check_provenance(const Graph& graph, std::vector<std::string>& violations) {
  std::vector<int> owners(graph.storages.size(), 0);
  for (const UnitSpec& unit : graph.units) {
    for (int s : unit.storages) ++owners[s];
  }
  for (size_t s = 0; s < graph.storages.size(); ++s) {
    const StorageSpec& spec = graph.storages[s];
    if (owners[s] != (spec.unit >= 0 ? 1 : 0)) {
      violations.push_back(spec.name + " is counted in " + std::to_string(owners[s]) + " units");
    }
    if (spec.derived_from < 0) continue;
    const StorageSpec& origin = graph.storages[spec.derived_from];
    if (origin.producer >= spec.producer) {
      violations.push_back(spec.name + " is derived from " + origin.name + ", which is newer");
    }
    if (origin.derived_from == static_cast<int>(s)) {
      violations.push_back(spec.name + " and " + origin.name + " are derived from each other");
    }
  }
}

}  // namespace

VerifiedPlan verify_plan(const Graph& graph, const Plan& plan, const std::vector<LayerLoad>& loads,
                         int64_t budget_bytes) {
  VerifiedPlan result;
  check_choices(graph, plan, result.violations);
  check_provenance(graph, result.violations);
  if (loads.size() != static_cast<size_t>(graph.layers)) {
    result.violations.push_back("loads of " + std::to_string(loads.size()) + " layers for " +
                                std::to_string(graph.layers));
  }
  if (!result.ok()) return result;
  Simulation(graph, plan, loads, result).run();
  if (budget_bytes > 0 && result.peak_bytes > budget_bytes) {
    result.violations.push_back("peak of " + std::to_string(result.peak_bytes) +
                                " bytes is above the budget of " + std::to_string(budget_bytes));
  }
  return result;
}

}  // namespace bagualu
