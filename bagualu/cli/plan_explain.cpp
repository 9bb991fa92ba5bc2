#include "bagualu/cli/plan_explain.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/cost/residency.h"

namespace bagualu {
namespace {

constexpr size_t kMaxRemovedLines = 6;  // of one component in the table; JSON has all

bool is_open_to(const UnitSpec& unit, const ResidencySpec& residency) {
  return !residency.changes_numerics &&
         (!residency.needs_rebuild || unit.rebuild != Rebuild::kNever);
}

bool is_retained(ResidencyId residency) {
  const Retire retire = residencies()[residency].retire;
  return retire == Retire::kKeep || retire == Retire::kOffload;
}

std::string local_text(const Graph& graph, int unit) {
  const std::string& name = graph.units[static_cast<size_t>(unit)].name;
  const size_t dot = name.find('.');
  return dot == std::string::npos ? name : name.substr(dot + 1);
}

/// Explains one component: counts over its combinations again to name those that are gone.
class ComponentExplainer {
 public:
  ComponentExplainer(const Frontier& frontier, const FrontierComponent& component,
                     const LayerLoad& load)
      : graph_(frontier.graph()), frontier_(frontier), component_(component), load_(load) {
    for (const FrontierOption& option : component.options) {
      kept_.push_back(frontier.value(component, option, load));
    }
  }

  ExplainedComponent answer() const {
    ExplainedComponent result;
    result.layer = component_.layer;
    result.combinations = component_.combinations;
    for (int u : component_.units) result.units.push_back(local_text(graph_, u));
    result.coupled_by = shared_operators();
    FrontierOption option;
    option.choice.assign(component_.units.size(), kSave);
    do {
      if (!is_kept(option)) result.removed.push_back(removed(option));
    } while (next(option.choice));
    BGL_CHECK(static_cast<int64_t>(result.removed.size()) == component_.redundant,
              graph_.units[static_cast<size_t>(component_.units[0])].name);
    return result;
  }

 private:
  std::vector<std::string> shared_operators() const {
    std::vector<int> runs_for(graph_.ops.size(), 0);
    for (int u : component_.units) {
      for (int op : frontier_.closure(u)) ++runs_for[static_cast<size_t>(op)];
    }
    std::vector<std::string> names;
    for (size_t op = 0; op < runs_for.size(); ++op) {
      if (runs_for[op] > 1) names.push_back(graph_.ops[op].name);
    }
    return names;
  }

  /// Counts on to the next combination; false after the last one.
  bool next(std::vector<ResidencyId>& choice) const {
    for (size_t i = 0; i < choice.size(); ++i) {
      const UnitSpec& unit = graph_.units[static_cast<size_t>(component_.units[i])];
      while (++choice[i] < residencies().size()) {
        if (!is_retained(choice[i]) && is_open_to(unit, residencies()[choice[i]])) return true;
      }
      choice[i] = kSave;
    }
    return false;
  }

  bool is_kept(const FrontierOption& option) const {
    return std::any_of(component_.options.begin(), component_.options.end(),
                       [&](const FrontierOption& kept) { return kept.choice == option.choice; });
  }

  /// The smallest of the kept options that need nothing which `option` gave up.
  RemovedCombination removed(FrontierOption option) const {
    close(option);
    const OptionValue value = frontier_.value(component_, option, load_);
    int best = -1;
    for (size_t k = 0; k < kept_.size(); ++k) {
      const std::vector<ResidencyId>& choice = component_.options[k].choice;
      bool retains_less = true;
      for (size_t i = 0; i < choice.size(); ++i) {
        retains_less = retains_less && !(is_retained(choice[i]) && !is_retained(option.choice[i]));
      }
      if (!retains_less || kept_[k].bytes() > value.bytes() ||
          kept_[k].compute_ns > value.compute_ns) {
        continue;
      }
      if (best < 0 || kept_[k].bytes() < kept_[static_cast<size_t>(best)].bytes()) {
        best = static_cast<int>(k);
      }
    }
    BGL_CHECK(best >= 0, component_.layer);
    const auto instead = static_cast<size_t>(best);
    return {text(option), text(component_.options[instead]), value.bytes() - kept_[instead].bytes(),
            value.compute_ns - kept_[instead].compute_ns};
  }

  void close(FrontierOption& option) const {
    for (size_t i = 0; i < option.choice.size(); ++i) {
      if (!residencies()[option.choice[i]].needs_rebuild) continue;
      const std::vector<int>& ops = frontier_.closure(component_.units[i]);
      option.closure.insert(option.closure.end(), ops.begin(), ops.end());
    }
    std::sort(option.closure.begin(), option.closure.end());
    option.closure.erase(std::unique(option.closure.begin(), option.closure.end()),
                         option.closure.end());
  }

  ExplainedChoice text(const FrontierOption& option) const {
    ExplainedChoice result;
    for (size_t r = 0; r < residencies().size(); ++r) {
      ExplainedChoice::Part part{std::string(residencies()[r].name), {}};
      for (size_t i = 0; i < option.choice.size(); ++i) {
        if (option.choice[i] != r || is_retained(option.choice[i])) continue;
        part.units.push_back(local_text(graph_, component_.units[i]));
      }
      if (!part.units.empty()) result.parts.push_back(std::move(part));
    }
    return result;
  }

  const Graph& graph_;
  const Frontier& frontier_;
  const FrontierComponent& component_;
  const LayerLoad load_;
  std::vector<OptionValue> kept_;  // by option
};

Json choice_json(const ExplainedChoice& choice) {
  Json json = Json::object();
  for (const auto& part : choice.parts) json[part.residency] = part.units;
  return json;
}

Json counts_json(const ExplainedLayer& layer) {
  return {{"units", layer.units},
          {"pinned", layer.pinned},
          {"naive_log10", layer.naive_log10},
          {"components", layer.components},
          {"combinations", layer.combinations},
          {"redundant", layer.redundant},
          {"options", layer.combinations - layer.redundant}};
}

std::string choice_text(const ExplainedChoice& choice) {
  std::string text;
  for (const auto& part : choice.parts) {
    text += fmt::format("{}{} {}", text.empty() ? "" : "; ", part.residency,
                        fmt::join(part.units, ", "));
  }
  return text.empty() ? "keep all" : text;
}

std::string power_text(double log10) {
  if (log10 < 6) return fmt::format("{:.0f}", std::pow(10.0, log10));
  return fmt::format("10^{:.1f}", log10);
}

bool same_counts(const ExplainedLayer& a, const ExplainedLayer& b) {
  return (a.layer < 0) == (b.layer < 0) && a.units == b.units && a.pinned == b.pinned &&
         a.naive_log10 == b.naive_log10 && a.components == b.components &&
         a.combinations == b.combinations && a.redundant == b.redundant;
}

std::string span_text(int first, int last) {
  if (first < 0) return "ends";
  return first == last ? fmt::format("layer {}", first)
                       : fmt::format("layers {}-{}, each", first, last);
}

void print_counts(const std::string& label, const ExplainedLayer& counts, std::ostream& out) {
  out << fmt::format("  {:<20}{:<8}{:<14}{:<12}{:<12}{:<12}{}\n", label, counts.units,
                     power_text(counts.naive_log10), counts.components, counts.combinations,
                     counts.redundant, counts.combinations - counts.redundant);
}

/// "qkv_a, qkv_b (shared: qkv)": equal for components that differ in nothing but the layer.
std::string coupling_text(const ExplainedComponent& component) {
  std::vector<std::string> operators;
  for (const std::string& name : component.coupled_by) {
    const size_t dot = name.find('.');
    operators.push_back(dot == std::string::npos ? name : name.substr(dot + 1));
  }
  const std::string units = fmt::format("{}", fmt::join(component.units, ", "));
  if (operators.empty()) return units;
  return fmt::format("{}\n    shared: {}", units, fmt::join(operators, ", "));
}

void print_removed(const ExplainedComponent& component, std::ostream& out) {
  const size_t lines = std::min(component.removed.size(), kMaxRemovedLines);
  for (size_t i = 0; i < lines; ++i) {
    const RemovedCombination& gone = component.removed[i];
    out << fmt::format("    without: {}\n        for: {} ({} and {} less)\n",
                       choice_text(gone.choice), choice_text(gone.instead),
                       format_bytes(gone.bytes_less), format_ns(gone.ns_less));
  }
  if (component.removed.size() > lines) {
    out << fmt::format("    and {} more, all in --json\n", component.removed.size() - lines);
  }
}

void print_components(const std::vector<ExplainedComponent>& components, std::ostream& out) {
  std::vector<std::string> seen;
  for (const ExplainedComponent& component : components) {
    if (component.units.size() < 2 && component.removed.empty()) continue;
    const std::string text = coupling_text(component);
    if (std::find(seen.begin(), seen.end(), text) != seen.end()) continue;
    seen.push_back(text);
    std::vector<int> layers;
    for (const ExplainedComponent& other : components) {
      if (coupling_text(other) == text) layers.push_back(other.layer);
    }
    const std::string where =
        layers[0] < 0 ? "ends"
                      : fmt::format("{} of the layers, first {}", layers.size(), layers[0]);
    out << fmt::format("  {}: {}\n", where, text);
    print_removed(component, out);
  }
  if (seen.empty()) {
    out << "  none: every unit is rebuilt by operators of its own, so prices add up\n";
  }
}

}  // namespace

PlanExplanation explain_plan(const Graph& graph, const CostTable& cost, const LayerLoad& balanced) {
  const Frontier frontier(graph, cost, /*allow_quantise=*/false);
  PlanExplanation result;
  for (int layer = -1; layer < graph.layers; ++layer) {
    result.layers.emplace_back();
    result.layers.back().layer = layer;
  }
  const auto layer_of = [&](int layer) -> ExplainedLayer& {
    return result.layers[static_cast<size_t>(layer + 1)];
  };
  for (const UnitSpec& unit : graph.units) {
    ExplainedLayer& layer = layer_of(unit.layer);
    if (unit.pinned) {
      ++layer.pinned;
      continue;
    }
    ++layer.units;
    const auto open = std::count_if(residencies().begin(), residencies().end(),
                                    [&](const ResidencySpec& r) { return is_open_to(unit, r); });
    layer.naive_log10 += std::log10(static_cast<double>(open));
  }
  for (const FrontierComponent& component : frontier.components()) {
    ExplainedLayer& layer = layer_of(component.layer);
    ++layer.components;
    layer.combinations += component.combinations;
    layer.redundant += component.redundant;
    result.components.push_back(ComponentExplainer(frontier, component, balanced).answer());
  }
  for (const ExplainedLayer& layer : result.layers) {
    result.total.units += layer.units;
    result.total.pinned += layer.pinned;
    result.total.naive_log10 += layer.naive_log10;
    result.total.components += layer.components;
    result.total.combinations += layer.combinations;
    result.total.redundant += layer.redundant;
  }
  return result;
}

Json to_json(const PlanExplanation& explanation) {
  Json layers = Json::array(), components = Json::array();
  for (const ExplainedLayer& layer : explanation.layers) {
    layers.push_back(counts_json(layer));
    layers.back()["layer"] = layer.layer;
  }
  for (const ExplainedComponent& component : explanation.components) {
    Json removed = Json::array();
    for (const RemovedCombination& gone : component.removed) {
      removed.push_back({{"choice", choice_json(gone.choice)},
                         {"instead", choice_json(gone.instead)},
                         {"bytes_less", gone.bytes_less},
                         {"ns_less", gone.ns_less}});
    }
    components.push_back({{"layer", component.layer},
                          {"units", component.units},
                          {"coupled_by", component.coupled_by},
                          {"combinations", component.combinations},
                          {"redundant", component.removed.size()},
                          {"removed", removed}});
  }
  return {
      {"total", counts_json(explanation.total)}, {"layers", layers}, {"components", components}};
}

void print_explanation(const PlanExplanation& explanation, std::ostream& out) {
  out << fmt::format("\n{:<22}{:<8}{:<14}{:<12}{:<12}{:<12}{}\n", "choices that are left", "units",
                     "naive", "components", "looked at", "redundant", "options");
  const std::vector<ExplainedLayer>& layers = explanation.layers;
  for (size_t first = 0, next = 0; first < layers.size(); first = next) {
    while (next < layers.size() && same_counts(layers[next], layers[first])) ++next;
    print_counts(span_text(layers[first].layer, layers[next - 1].layer), layers[first], out);
  }
  print_counts("total", explanation.total, out);
  const double looked_at =
      static_cast<double>(std::max<int64_t>(1, explanation.total.combinations));
  out << fmt::format(
      "  naive: save, offload or recompute for every unit that may (pinned ones may not, rows behind\n"
      "  a collective are not recomputed); components are priced one by one, so\n"
      "  {} combinations stand for {}, a factor of 10^{:.1f}; what goes over the link is decided\n"
      "  among the kept ones\n\n",
      explanation.total.combinations, power_text(explanation.total.naive_log10),
      explanation.total.naive_log10 - std::log10(looked_at));
  out << "coupled units, and combinations that are redundant\n";
  print_components(explanation.components, out);
}

}  // namespace bagualu
