#include <array>

#include "bagualu/base/error.h"
#include "bagualu/schedule/timeline.h"

namespace bagualu {
namespace {

constexpr int kPlanVersion = 1;

std::string_view action_name(ActionKind kind) {
  static constexpr std::array<std::string_view, 16> kNames = {
      "forward",     "backward",     "recompute",  "free",       "drop",   "offload",
      "drain",       "reload",       "await",      "encode",     "decode", "gate",
      "forward_end", "backward_end", "input_grad", "weight_grad"};
  return kNames[static_cast<size_t>(kind)];
}

}  // namespace

Json plan_to_json(const Graph& graph, const Plan& plan) {
  Json units = Json::object();
  for (size_t u = 0; u < graph.units.size(); ++u) {
    if (plan.residency[u] == kSave) continue;
    units[graph.units[u].name] = residencies()[plan.residency[u]].name;
  }
  return {{"version", kPlanVersion},
          {"eager_drain", plan.eager_drain},
          {"prefetch", plan.prefetch},
          {"units", units}};
}

Plan plan_from_json(const Graph& graph, const Json& json, const std::string& where) {
  JsonReader reader(json, where);
  reader.int64("version", kPlanVersion, kPlanVersion);
  Plan plan = uniform_plan(graph, kSave);
  plan.eager_drain = reader.boolean_or("eager_drain", false);
  plan.prefetch = reader.boolean_or("prefetch", true);
  const Json& units = reader.object("units");
  reader.finish();
  for (const auto& [name, value] : units.items()) {
    const int unit = graph.find_unit(name);
    if (unit < 0) throw InvalidInput(where, "units", name, "a unit of this model's graph");
    if (!value.is_string()) {
      throw InvalidInput(where, "units." + name, value.dump(), "a residency's name");
    }
    const ResidencyId residency = residency_from_name(value.get<std::string>(), where);
    if (uniform_plan(graph, residency).residency[unit] != residency) {
      throw InvalidInput(where, "units." + name, value.get<std::string>(),
                         graph.units[unit].pinned ? "save (routing results are pinned)"
                                                  : "save or offload (it is never recomputed)");
    }
    plan.residency[unit] = residency;
  }
  return plan;
}

bool names_op(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
    case ActionKind::kBackward:
    case ActionKind::kRecompute:
    case ActionKind::kForwardEnd:
    case ActionKind::kBackwardEnd:
    case ActionKind::kInputGrad:
    case ActionKind::kWeightGrad:
      return true;
    default:
      return false;
  }
}

std::string action_text(const Graph& graph, const Action& action) {
  std::string text(action_name(action.kind));
  text += ' ';
  if (action.kind == ActionKind::kGate) return text + "layer" + std::to_string(action.id);
  return text +
         (names_op(action.kind) ? graph.ops[action.id].name : graph.storages[action.id].name);
}

std::string timeline_to_text(const Graph& graph, const Timeline& timeline) {
  std::string text;
  for (const Action& action : timeline) text += action_text(graph, action) + '\n';
  return text;
}

}  // namespace bagualu
