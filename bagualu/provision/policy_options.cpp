#include "bagualu/provision/policy_options.h"

#include "bagualu/base/error.h"

namespace bagualu {

PolicyOptions read_policy_options(JsonReader* reader) {
  PolicyOptions options;
  const auto factor = [&](const char* key, double fallback) {
    return reader->number_or(key, fallback, 1.0);
  };
  options.plan = reader->raw("plan");
  options.static_fit_imbalance = factor("static_fit_imbalance", options.static_fit_imbalance);
  options.threshold = factor("threshold", options.threshold);
  options.adapipe_fit_imbalance = factor("adapipe_fit_imbalance", options.adapipe_fit_imbalance);
  options.adapipe_in_flight = reader->int64_or("adapipe_in_flight", options.adapipe_in_flight, 1);
  if (reader->has("kwai_offload_ratio")) {
    options.kwai_offload_ratio = reader->number("kwai_offload_ratio", 0.0, 1.0);
  }
  options.kwai_fit_imbalance = factor("kwai_fit_imbalance", options.kwai_fit_imbalance);
  options.retry_factor = factor("retry_factor", options.retry_factor);
  const Json& modules = reader->raw("recompute_modules");
  if (modules.is_null()) return options;
  const auto refuse = [&](const Json& found) {
    throw InvalidInput(reader->where(), "recompute_modules", found.dump(),
                       "a list of texts, as [\"moe_act\", \"layernorm\"]");
  };
  if (!modules.is_array()) refuse(modules);
  for (const Json& module : modules) {
    if (!module.is_string()) refuse(modules);
    options.recompute_modules.push_back(module.get<std::string>());
  }
  return options;
}

PolicyOptions policy_options_from_json(const Json& json, const std::string& where) {
  JsonReader reader(json, where);
  PolicyOptions options = read_policy_options(&reader);
  reader.finish();
  return options;
}

}  // namespace bagualu
