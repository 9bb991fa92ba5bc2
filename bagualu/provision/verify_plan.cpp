#include "bagualu/provision/verify_plan.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <string_view>

#include "bagualu/base/units.h"
#include "bagualu/cost/residency.h"
#include "bagualu/provision/provenance.h"

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
    count_freed();
    for (int i = ops - 1; i >= 0; --i) backward(i);
    for (size_t s = 0; s < place_.size(); ++s) {
      if (place_[s] == Place::kNowhere || place_[s] == Place::kInPieces) continue;
      result_.violations.push_back(graph_.storages[s].name + " is still held after the backward");
    }
  }

 private:
  enum class Place { kNowhere, kDevice, kLeaving, kHost, kEncoded, kInPieces, kLost };

  const LayerLoad& load(int layer) const {
    static const LayerLoad kNone;
    return layer < 0 ? kNone : loads_[static_cast<size_t>(layer)];
  }

  static int64_t charged(const ByteFormula& f, int64_t tokens, const LayerLoad& load) {
    const int64_t bytes =
        f.fixed + f.per_token * tokens + f.per_row * load.rows + f.per_piece_row * load.piece_rows;
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

  // Between forward and backward: what would be there if everything were kept, less what is there.
  void count_freed() {
    for (const UnitSpec& unit : graph_.units) {
      for (int s : unit.storages) result_.freed_bytes += bytes_of(s);
    }
    result_.freed_bytes -= resident();
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
      case Place::kNowhere:
        if (graph_.storages[s].unit < 0) {  // not kept: a closure goes on through its producer
          rebuild(graph_.storages[s].producer);
          return;
        }
        [[fallthrough]];
      default:
        result_.violations.push_back("backward needs " + graph_.storages[s].name +
                                     ", which nothing can bring back");
    }
  }

  // Runs an operator again. Outputs that are still held are written beside them and thrown away;
  // those that nobody keeps live until the backward they were rebuilt for begins. What else was
  // dropped and reads such an output is rebuilt now, or the closure would run again for it.
  void rebuild(int i) {
    const OpSpec& op = graph_.ops[i];
    check_may_run_again(op);
    for (int s : op.reads) bring(s);
    const bool done = std::none_of(op.creates.begin(), op.creates.end(), [this](int s) {
      return place_[s] == Place::kLost ||
             (graph_.storages[s].unit < 0 && place_[s] == Place::kNowhere);
    });
    if (done) return;  // what an input needed has run this one too
    int64_t written_twice = 0;
    for (int s : op.creates) {
      if (graph_.storages[s].unit < 0 && place_[s] == Place::kNowhere) {
        borrowed_.push_back(s);
      } else if (place_[s] != Place::kLost) {
        written_twice += bytes_of(s);
        continue;
      }
      place_[s] = Place::kDevice;
    }
    note(scratch(op.fwd_workspace, op.layer) + written_twice);
    if (borrowed_.empty()) return;
    for (size_t j = 0; j < graph_.ops.size(); ++j) {
      const OpSpec& other = graph_.ops[j];
      if (&other == &op || other.layer != op.layer || !any_at(other.creates, Place::kLost))
        continue;
      if (reads_borrowed(other)) rebuild(static_cast<int>(j));
    }
  }

  // By itself or through outputs that nobody keeps.
  bool reads_borrowed(const OpSpec& op) const {
    for (int s : op.reads) {
      if (std::find(borrowed_.begin(), borrowed_.end(), s) != borrowed_.end()) return true;
      const StorageSpec& spec = graph_.storages[s];
      if (spec.unit < 0 && reads_borrowed(graph_.ops[spec.producer])) return true;
    }
    return false;
  }

  bool any_at(const std::vector<int>& storages, Place place) const {
    return std::any_of(storages.begin(), storages.end(),
                       [this, place](int s) { return place_[s] == place; });
  }

  // Ranks would wait for each other, or tokens change their experts.
  void check_may_run_again(const OpSpec& op) {
    if (op.stream == Stream::kComm) {
      result_.violations.push_back("a rebuild would repeat the collective " + op.name);
    }
    for (int s : op.creates) {
      const int unit = graph_.storages[s].unit;
      if (unit < 0 || !graph_.units[unit].pinned) continue;
      result_.violations.push_back("a rebuild would repeat " + op.name +
                                   ", which makes the pinned " + graph_.storages[s].name);
    }
  }

  void return_borrowed() {
    for (int s : borrowed_) place_[s] = Place::kNowhere;
    borrowed_.clear();
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
    return_borrowed();
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
  std::vector<int> borrowed_;  ///< rebuilt for a closure only
  std::vector<int> marks_ = std::vector<int>(place_.size(), 0);
};

void check_choices(const Graph& graph, const Plan& plan, std::vector<std::string>& violations) {
  if (plan.residency.size() != graph.units.size()) {
    violations.push_back("the plan has " + std::to_string(plan.residency.size()) + " choices for " +
                         std::to_string(graph.units.size()) + " units");
    return;
  }
  for (size_t u = 0; u < graph.units.size(); ++u) {
    const UnitSpec& unit = graph.units[u];
    if (plan.residency[u] >= residencies().size()) {
      violations.push_back(unit.name + " has no registered residency");
      continue;
    }
    const ResidencySpec& choice = residencies()[plan.residency[u]];
    for (int s : unit.storages) {
      if (!graph.storages[s].persistent || choice.retire == Retire::kKeep) continue;
      violations.push_back(graph.storages[s].name + " is a view of persistent memory, not to " +
                           std::string(choice.name));
    }
    if (unit.pinned && choice.retire != Retire::kKeep) {
      violations.push_back(unit.name + " is pinned, not to " + std::string(choice.name));
    }
    if (choice.needs_rebuild && unit.rebuild == Rebuild::kNever) {
      violations.push_back(unit.name + " cannot be rebuilt, so " + std::string(choice.name) +
                           " loses it");
    }
  }
}

}  // namespace

VerifiedPlan verify_plan(const Graph& graph, const Plan& plan, const std::vector<LayerLoad>& loads,
                         int64_t budget_bytes, int64_t claimed_bytes) {
  VerifiedPlan result;
  result.violations = provenance_violations(graph);
  if (!result.ok()) return result;
  check_choices(graph, plan, result.violations);
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
  if (claimed_bytes > result.freed_bytes) {
    result.violations.push_back("claims to free " + std::to_string(claimed_bytes) +
                                " bytes and frees " + std::to_string(result.freed_bytes));
  }
  return result;
}

}  // namespace bagualu
