// The policies of a scenario: names with the settings of their publications, groups of names, and
// objects that say everything themselves.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/base/nearest.h"
#include "bagualu/model/routing_log.h"
#include "bagualu/provision/policy_options.h"
#include "bagualu/sim/scenario_parts.h"

namespace bagualu {
namespace {

constexpr const char* kRivals = "rivals";
constexpr const char* kAblation = "ablation";

bool among(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

std::string names_text(std::vector<std::string> names, const std::string& found) {
  return fmt::format("{}; nearest is \"{}\"", fmt::join(names, ", "), nearest_name(found, names));
}

class PolicyList {
 public:
  PolicyList(const std::string& where, Scenario* scenario) : where_(where), scenario_(*scenario) {}

  void add(const std::string& field, const Json& item) {
    if (item.is_string()) {
      add_name(field, item.get<std::string>());
    } else if (item.is_object()) {
      push(field, read(where_ + "." + field, item));
    } else {
      throw InvalidInput(where_, field, item.dump(), "a name or an object with \"policy\"");
    }
  }

  void add_name(const std::string& field, const std::string& name) {
    if (name == kAblation) {
      for (SimPolicy& policy : ablation_policies(scenario_largest())) {
        push(field, std::move(policy));
      }
    } else if (name == kRivals) {
      for (const std::string& rival : rival_names()) push(field, published(rival));
    } else if (among(policy_names(), name)) {
      push(field, published(name));
    } else {
      std::vector<std::string> names = policy_names();
      names.insert(names.end(), {kRivals, kAblation});
      throw InvalidInput(where_, field, fmt::format("\"{}\"", name), names_text(names, name));
    }
  }

 private:
  SimPolicy read(const std::string& where, const Json& item) const {
    JsonReader reader(item, where);
    SimPolicy policy;
    policy.policy = reader.string("policy");
    if (!among(policy_names(), policy.policy)) {
      throw InvalidInput(where, "policy", fmt::format("\"{}\"", policy.policy),
                         names_text(policy_names(), policy.policy));
    }
    policy.label = reader.string_or("label", policy.policy);
    policy.overlap = reader.boolean_or("overlap", policy.policy == "adaptive");
    policy.options = read_policy_options(&reader);
    reader.finish();
    if (policy.policy == "selective" && policy.options.recompute_modules.empty()) {
      throw InvalidInput(where, "recompute_modules", "nothing",
                         "at least one module, as [\"moe_act\"], or the name \"selective\" alone, "
                         "which searches for them");
    }
    return policy;
  }

  SimPolicy published(const std::string& name) const {
    return published_settings(name, scenario_.job, scenario_.system, scenario_.budget_bytes);
  }

  double scenario_largest() const {
    if (scenario_.trace.empty()) return largest_imbalance(scenario_.routing);
    return largest_imbalance(fit_routing(read_routing_logs({scenario_.trace})));
  }

  void push(const std::string& field, SimPolicy policy) {
    for (const SimPolicy& other : scenario_.policies) {
      if (other.label != policy.label) continue;
      throw InvalidInput(where_, field, fmt::format("\"{}\" twice", policy.label),
                         "every policy once, or a \"label\" that tells them apart");
    }
    scenario_.policies.push_back(std::move(policy));
  }

  const std::string& where_;
  Scenario& scenario_;
};

}  // namespace

double largest_imbalance(const RoutingShape& shape) {
  const double largest =
      shape.kind == "fitted" && !shape.quantiles.empty() ? shape.quantiles.back() : shape.largest;
  return largest * (1 + 3 * shape.microbatch_spread);
}

std::vector<SimPolicy> ablation_policies(double largest_imbalance) {
  PolicyOptions largest;
  largest.static_fit_imbalance = largest_imbalance;
  return {{.label = "full recompute", .policy = "full-recompute", .options = {}},
          {.label = "+ per operator", .policy = "static", .options = largest},
          {.label = "+ dynamic", .policy = "adaptive", .options = {}},
          {.label = "+ overlap", .policy = "adaptive", .options = {}, .overlap = true}};
}

void read_scenario_policies(JsonReader& reader, Scenario* scenario) {
  PolicyList list(reader.where(), scenario);
  const Json& items = reader.raw("policies");
  if (items.is_null()) {
    for (const char* name : {"full-recompute", kRivals, "adaptive"})
      list.add_name("policies", name);
    return;
  }
  if (!items.is_array() || items.empty()) {
    throw InvalidInput(reader.where(), "policies", items.dump(),
                       "a list of names and objects, as [\"rivals\", \"adaptive\"]");
  }
  for (size_t i = 0; i < items.size(); ++i) list.add(fmt::format("policies[{}]", i), items[i]);
}

}  // namespace bagualu
