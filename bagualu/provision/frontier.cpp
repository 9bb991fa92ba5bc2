#include "bagualu/provision/frontier.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/cost/op_flops.h"

namespace bagualu {
namespace {

void add_closure(const Graph& graph, int op, std::set<int>& closure) {
  if (!closure.insert(op).second) return;
  for (int s : graph.ops[op].reads) {
    if (graph.storages[s].unit < 0) add_closure(graph, graph.storages[s].producer, closure);
  }
}

bool sorted_subset(const std::vector<int>& a, const std::vector<int>& b) {
  return std::includes(b.begin(), b.end(), a.begin(), a.end());
}

bool grows_with_rows(const ByteFormula& bytes) {
  return bytes.per_row != 0 || bytes.per_piece_row != 0;
}

}  // namespace

Frontier::Frontier(const Graph& graph, const CostTable& cost, bool allow_quantise)
    : graph_(graph), cost_(cost), allow_quantise_(allow_quantise) {
  find_closures();
  find_components();
  for (FrontierComponent& component : components_) list_options(component);
}

void Frontier::find_closures() {
  closures_.resize(graph_.units.size());
  for (size_t u = 0; u < graph_.units.size(); ++u) {
    const UnitSpec& unit = graph_.units[u];
    if (unit.pinned) pinned_.push_back(static_cast<int>(u));
    if (unit.pinned || unit.rebuild != Rebuild::kOp) continue;
    std::set<int> closure;
    add_closure(graph_, unit.producer, closure);
    closures_[u].assign(closure.begin(), closure.end());
  }
}

// Units that share an operator of their closures, directly or through a third one.
void Frontier::find_components() {
  std::vector<int> parent(graph_.units.size());
  std::iota(parent.begin(), parent.end(), 0);
  const auto root = [&parent](int u) {
    while (parent[u] != u) u = parent[u] = parent[parent[u]];
    return u;
  };
  std::vector<int> first_unit(graph_.ops.size(), -1);
  for (int u = 0; u < static_cast<int>(closures_.size()); ++u) {
    for (int op : closures_[u]) {
      if (first_unit[op] < 0) first_unit[op] = u;
      const int a = root(first_unit[op]), b = root(u);
      parent[std::max(a, b)] = std::min(a, b);
    }
  }
  std::vector<int> component_of(graph_.units.size(), -1);
  for (int u = 0; u < static_cast<int>(graph_.units.size()); ++u) {
    if (graph_.units[u].pinned) continue;
    int& index = component_of[root(u)];
    if (index < 0) {
      index = static_cast<int>(components_.size());
      components_.emplace_back();
      components_.back().layer = graph_.units[u].layer;
    }
    FrontierComponent& component = components_[index];
    component.units.push_back(u);
    for (int s : graph_.units[u].storages) {
      component.scales = component.scales || grows_with_rows(graph_.storages[s].bytes);
    }
    for (int op : closures_[u]) {
      component.scales = component.scales || scales_with_rows(graph_.ops[op].kind);
    }
  }
}

bool Frontier::allowed(int unit, const ResidencySpec& choice) const {
  return (!choice.changes_numerics || allow_quantise_) &&
         (!choice.needs_rebuild || graph_.units[unit].rebuild != Rebuild::kNever);
}

void Frontier::list_options(FrontierComponent& component) {
  std::vector<std::vector<ResidencyId>> choices;
  component.combinations = 1;
  for (int u : component.units) {
    std::vector<ResidencyId> of_unit = {kSave};
    for (size_t r = 0; r < residencies().size(); ++r) {
      const ResidencySpec& spec = residencies()[r];
      if (spec.retire == Retire::kKeep || spec.retire == Retire::kOffload) continue;  // retained
      if (!allowed(u, spec)) continue;
      of_unit.push_back(static_cast<ResidencyId>(r));
    }
    component.combinations *= static_cast<int64_t>(of_unit.size());
    BGL_CHECK(component.combinations <= kMaxCombinations, graph_.units[u].name);
    choices.push_back(std::move(of_unit));
  }
  std::vector<FrontierOption> all;
  for (int64_t number = 0; number < component.combinations; ++number) {
    FrontierOption option;
    std::set<int> closure;
    int64_t rest = number;
    for (size_t i = 0; i < choices.size(); ++i) {
      const auto base = static_cast<int64_t>(choices[i].size());
      option.choice.push_back(choices[i][static_cast<size_t>(rest % base)]);
      rest /= base;
      if (!residencies()[option.choice.back()].needs_rebuild) continue;
      const auto& ops = closures_[static_cast<size_t>(component.units[i])];
      closure.insert(ops.begin(), ops.end());
    }
    option.closure.assign(closure.begin(), closure.end());
    all.push_back(std::move(option));
  }
  for (size_t b = 0; b < all.size(); ++b) {
    bool redundant = false;
    for (size_t a = 0; a < all.size() && !redundant; ++a) {
      if (a == b || !never_worse(component, all[a], all[b])) continue;
      // Of two equal ones the first stays.
      redundant = a < b || !never_worse(component, all[b], all[a]);
    }
    if (redundant) {
      ++component.redundant;
    } else {
      component.options.push_back(all[b]);
    }
  }
}

// `a` may stand for `b` at every load if it retains no unit that b does not (a link carries whole
// tensors, so fewer bytes in another tensor are no substitute) and costs no more: the numbers
// decide where nothing depends on the load, else the closures do.
bool Frontier::never_worse(const FrontierComponent& component, const FrontierOption& a,
                           const FrontierOption& b) const {
  bool drops_for_nothing = sorted_subset(a.closure, b.closure);
  for (size_t i = 0; i < a.choice.size(); ++i) {
    if (a.choice[i] == b.choice[i]) continue;
    if (a.choice[i] == kSave) return false;
    // Dropping costs nothing more if the closure runs anyhow; pieces and codes have their own
    // price.
    drops_for_nothing =
        drops_for_nothing && residencies()[a.choice[i]].retire == Retire::kDrop &&
        graph_.units[static_cast<size_t>(component.units[i])].rebuild == Rebuild::kOp;
  }
  if (drops_for_nothing || component.scales) return drops_for_nothing;
  const OptionValue x = value(component, a, {}), y = value(component, b, {});
  return x.fixed_bytes <= y.fixed_bytes && x.compute_ns <= y.compute_ns;
}

int64_t Frontier::encoded_bytes(int unit, const ResidencySpec& choice,
                                const LayerLoad& load) const {
  int64_t bytes = 0;
  for (int s : graph_.units[unit].storages) {
    const StorageSpec& storage = graph_.storages[s];
    bytes += round_up(
        choice.device_bytes(storage.bytes.eval(graph_.tokens, load), storage.lossy_element_bytes),
        kAllocationGranularity);
  }
  return bytes;
}

int64_t Frontier::least_kept_bytes(int unit, const LayerLoad& load) const {
  int64_t least = graph_.unit_bytes(unit, load);
  for (const ResidencySpec& choice : residencies()) {
    if (choice.retire != Retire::kEncode || !allowed(unit, choice)) continue;
    least = std::min(least, encoded_bytes(unit, choice, load));
  }
  return least;
}

int64_t Frontier::own_ns(int unit, ResidencyId residency, const LayerLoad& load) const {
  return cost_.residency_ns(graph_, unit, residency, load);
}

OptionValue Frontier::value(const FrontierComponent& component, const FrontierOption& option,
                            const LayerLoad& load) const {
  OptionValue value;
  for (size_t i = 0; i < option.choice.size(); ++i) {
    const int unit = component.units[i];
    const ResidencySpec& spec = residencies()[option.choice[i]];
    switch (spec.retire) {
      case Retire::kKeep:
      case Retire::kOffload:
        value.retained_bytes += graph_.unit_bytes(unit, load);
        break;
      case Retire::kDrop:
        if (closures_[static_cast<size_t>(unit)].empty()) {
          value.compute_ns += own_ns(unit, option.choice[i], load);
        }
        break;
      case Retire::kEncode:
        value.fixed_bytes += encoded_bytes(unit, spec, load);
        value.compute_ns += own_ns(unit, option.choice[i], load);
        break;
    }
  }
  for (int op : option.closure) value.compute_ns += cost_.forward_ns(graph_, op, load);
  return value;
}

}  // namespace bagualu
