#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "bagualu/sim/scenario.h"

namespace bagualu {

/// What the flags say about scenarios; texts as they were typed, empty: not given.
struct ScenarioChoice {
  std::string scenarios;  ///< "a,b": files or names
  std::string policies;
  std::string routing;
  std::optional<int64_t> seed;
};

/// "a,b,c" in its parts.
std::vector<std::string> split_list(const std::string& text);

/// Throws: InvalidInput(where, flag) for names and files that are not there, policies nobody knows,
///         traces that do not fit the scenario.
std::vector<Scenario> chosen_scenarios(const ScenarioChoice& choice,
                                       const std::vector<std::filesystem::path>& folders,
                                       const std::string& where);

/// Where models/, strategies/ and systems/ of scenarios lie, from the folders of scenarios.
std::vector<std::filesystem::path> config_roots(const std::vector<std::filesystem::path>& folders);

/// One line each: name, devices, model, machine, policies.
void print_scenarios(const std::vector<std::filesystem::path>& folders, std::ostream& out);

}  // namespace bagualu
