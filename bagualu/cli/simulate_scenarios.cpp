#include "bagualu/cli/simulate_scenarios.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "bagualu/base/config_file.h"
#include "bagualu/base/error.h"
#include "bagualu/base/nearest.h"
#include "bagualu/provision/policy.h"
#include "bagualu/sim/scenario_parts.h"

namespace bagualu {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> known_policies(const Scenario& scenario) {
  std::vector<std::string> names;
  for (const SimPolicy& policy : scenario.policies) {
    // A label with a comma cannot be written in a list.
    if (policy.label.find(',') == std::string::npos) names.push_back(policy.label);
  }
  for (const std::string& name : policy_names()) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  names.insert(names.end(), {"rivals", "ablation"});
  return names;
}

/// Those of the scenario that the name means: by label, else by policy. One that is called by
/// another policy's name is that one's setting here ("selective" that recomputes nothing).
std::vector<SimPolicy> own_policies(const Scenario& scenario, const std::string& name) {
  const std::vector<std::string>& names = policy_names();
  const auto is_policy_name = [&](const std::string& label) {
    return std::find(names.begin(), names.end(), label) != names.end();
  };
  std::vector<SimPolicy> found;
  for (const bool by_label : {true, false}) {
    for (const SimPolicy& policy : scenario.policies) {
      if (!by_label && is_policy_name(policy.label)) continue;
      if ((by_label ? policy.label : policy.policy) == name) found.push_back(policy);
    }
    if (!found.empty()) break;
  }
  return found;
}

/// As a scenario file's list would be read.
std::vector<SimPolicy> read_policies(Scenario scenario, const std::string& name,
                                     const std::string& where) {
  scenario.policies.clear();
  const Json list = {{"policies", Json::array({name})}};
  JsonReader reader(list, where);
  read_scenario_policies(reader, &scenario);
  return scenario.policies;
}

std::vector<SimPolicy> policies_of(const Scenario& scenario, const std::string& text,
                                   const std::string& where) {
  const std::vector<std::string> known = known_policies(scenario);
  std::vector<SimPolicy> chosen;
  for (const std::string& name : split_list(text)) {
    std::vector<SimPolicy> found = own_policies(scenario, name);
    if (found.empty() && std::find(known.begin(), known.end(), name) == known.end()) {
      throw InvalidInput(
          where, "--policy", fmt::format("\"{}\"", name),
          fmt::format("{}; nearest is \"{}\"", fmt::join(known, ", "), nearest_name(name, known)));
    }
    if (found.empty()) found = read_policies(scenario, name, where);
    for (SimPolicy& policy : found) {
      const bool twice = std::any_of(chosen.begin(), chosen.end(), [&](const SimPolicy& other) {
        return other.label == policy.label;
      });
      if (twice) {
        throw InvalidInput(where, "--policy", fmt::format("\"{}\" twice", policy.label),
                           "each policy once");
      }
      chosen.push_back(std::move(policy));
    }
  }
  return chosen;
}

/// Kinds that are complete by their name.
std::vector<std::string> without_settings(std::vector<std::string> kinds) {
  std::erase(kinds, "fitted");
  return kinds;
}

/// A kind, a JSON file with a shape, or a trace.
void set_routing(Scenario* scenario, const std::string& text, const std::string& where) {
  const auto& kinds = routing_kinds();
  const uint64_t seed = scenario->routing.seed;
  std::error_code status;
  if (std::find(kinds.begin(), kinds.end(), text) != kinds.end()) {
    scenario->routing = routing_shape_from_json({{"kind", text}}, where + ": --routing");
    scenario->routing.seed = seed;
    scenario->trace.clear();
  } else if (!fs::is_regular_file(text, status)) {
    throw InvalidInput(
        where, "--routing", fmt::format("\"{}\", no such file or kind", text),
        fmt::format("a trace, a JSON file (as `bagualu trace --fit` writes), or one of {}",
                    fmt::join(without_settings(kinds), ", ")));
  } else if (fs::path(text).extension() == ".json") {
    const Json shape = read_json_file(text);
    scenario->routing_file = text;
    scenario->routing = routing_shape_from_json(shape, text);
    if (!shape.contains("seed")) scenario->routing.seed = seed;
    scenario->trace.clear();
  } else {
    scenario->trace = text;
  }
}

std::vector<fs::path> scenario_files(const std::vector<fs::path>& folders) {
  std::set<fs::path> files;
  std::error_code status;
  for (const fs::path& folder : folders) {
    for (const auto& entry : fs::directory_iterator(folder, status)) {
      if (entry.path().extension() == ".json") files.insert(entry.path());
    }
  }
  return {files.begin(), files.end()};
}

}  // namespace

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::vector<fs::path> config_roots(const std::vector<fs::path>& folders) {
  std::vector<fs::path> roots;
  for (const fs::path& folder : folders) roots.push_back(folder.parent_path());
  return roots;
}

std::vector<Scenario> chosen_scenarios(const ScenarioChoice& choice,
                                       const std::vector<fs::path>& folders,
                                       const std::string& where) {
  if (choice.scenarios.empty()) {
    throw InvalidInput(where, "--scenario", "nothing", "a file or a name; --list shows the names");
  }
  std::vector<Scenario> scenarios;
  std::set<fs::path> seen;
  for (const std::string& text : split_list(choice.scenarios)) {
    const fs::path file = resolve_config(text, folders, where, "--scenario");
    std::error_code status;
    if (!seen.insert(fs::weakly_canonical(file, status)).second) {
      throw InvalidInput(where, "--scenario", fmt::format("\"{}\" twice", text),
                         "each scenario once");
    }
    Scenario scenario = scenario_from_file(file, config_roots(folders));
    if (choice.seed) {
      scenario.seed = static_cast<uint64_t>(*choice.seed);
      scenario.routing.seed = scenario.seed;
    }
    if (!choice.routing.empty()) {
      set_routing(&scenario, choice.routing, where);
      if (!scenario.trace.empty()) check_trace(&scenario);
    }
    if (!choice.policies.empty()) {
      scenario.policies = policies_of(scenario, choice.policies, where);
    }
    scenarios.push_back(std::move(scenario));
  }
  return scenarios;
}

void print_scenarios(const std::vector<fs::path>& folders, std::ostream& out) {
  const std::vector<fs::path> files = scenario_files(folders);
  size_t width = 0;
  for (const fs::path& file : files) width = std::max(width, file.stem().string().size());
  for (const fs::path& file : files) {
    const Scenario scenario = scenario_from_file(file, config_roots(folders));
    std::vector<std::string> labels;
    for (const SimPolicy& policy : scenario.policies) labels.push_back(policy.label);
    out << fmt::format("{:<{}}  {:>6} devices of {}, {}, {} iterations: {}\n", file.stem().string(),
                       width, scenario.job.layout.world_size, scenario.system.name,
                       scenario.job.model.name, scenario.iterations, fmt::join(labels, "; "));
  }
  if (files.empty()) out << "no scenarios are installed\n";
}

}  // namespace bagualu
