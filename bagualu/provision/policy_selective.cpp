// selective: Megatron's --recompute-granularity selective with a list of module names.
#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/provision/planning_policy.h"

namespace bagualu {
namespace {

struct Module {
  std::string_view name;
  std::vector<std::string_view> ops;  ///< whose outputs are dropped; without the layer's prefix
};

// Megatron's names. Its `moe` wraps the whole MoE layer in one closure, collectives included; here
// no collective is repeated, so it covers what can be rebuilt without one.
const std::vector<Module>& modules() {
  static const std::vector<Module> kModules = {
      {"core_attn", {"core_attn"}},
      {"moe_act", {"moe_act"}},
      {"layernorm", {"attn_norm", "mlp_norm", "qk_norm"}},
      {"mla_up_proj", {"q_up", "q_rope", "kv_up", "k_rope"}},
      {"mlp", {"mlp_fc1", "mlp_act"}},
      {"mlp_act", {"mlp_act"}},
      {"moe", {"expert_fc1", "moe_act", "mlp_norm"}},
      {"moe_experts", {"expert_fc1", "moe_act"}},
      {"shared_experts", {"shared_fc1", "shared_act"}},
  };
  return kModules;
}

const Module& find_module(const std::string& name) {
  std::string allowed;
  for (const Module& module : modules()) {
    if (module.name == name) return module;
    allowed += (allowed.empty() ? "" : ", ") + std::string(module.name);
  }
  throw InvalidInput("options", "recompute_modules", name, allowed);
}

bool is_stage(const Graph& graph) {
  return std::any_of(graph.ops.begin(), graph.ops.end(), [](const OpSpec& op) {
    return op.kind == OpKind::kStageRecv || op.kind == OpKind::kStageSend;
  });
}

Plan selective_plan(const Graph& graph, const std::vector<std::string>& names) {
  if (names.empty()) {
    throw InvalidInput("options", "recompute_modules", "an empty list", "at least one module");
  }
  const Plan recompute_all = uniform_plan(graph, kRecompute);
  Plan plan = uniform_plan(graph, kSave);
  for (const std::string& name : names) {
    const Module& module = find_module(name);
    bool matched = false;
    for (size_t u = 0; u < graph.units.size(); ++u) {
      for (std::string_view op : module.ops) {
        if (!is_made_by(graph, graph.units[u], op)) continue;
        plan.residency[u] = recompute_all.residency[u];
        matched = true;
      }
    }
    // A stage need not have what another stage has.
    if (!matched && !is_stage(graph)) {
      throw InvalidInput("options", "recompute_modules", name,
                         "a module that this model has (none of its layers has this one)");
    }
  }
  return plan;
}

class Selective final : public PlanningPolicy {
 public:
  Selective(const ProvisionContext& context, const std::vector<std::string>& names)
      : PlanningPolicy(context), plan_(selective_plan(graph_, names)) {}

  std::string_view name() const override { return "selective"; }
  Decision decide(const GateInput& input) override { return describe(input, plan_); }

 private:
  const Plan plan_;
};

}  // namespace

std::unique_ptr<Policy> make_selective(const ProvisionContext& context,
                                       const PolicyOptions& options) {
  return std::make_unique<Selective>(context, options.recompute_modules);
}

}  // namespace bagualu
