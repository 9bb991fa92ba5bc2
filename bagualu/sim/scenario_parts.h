// Pieces of scenario.cpp that other files of the room hold.
#pragma once

#include <string>
#include <string_view>

#include "bagualu/base/json.h"
#include "bagualu/sim/scenario.h"

namespace bagualu {

inline constexpr const char* kTimeAllowed =
    "a time of at most a year as text, \"284s\", with the unit ms, s, min, h or d";

/// Reads "284s", "1.5 h". Throws: InvalidInput(where, field).
double parse_seconds(std::string_view text, const std::string& where, const std::string& field);

/// The list under "policies": names, groups of names, objects.
/// Requires: the rest of the scenario has been read.
void read_scenario_policies(JsonReader& reader, Scenario* scenario);

}  // namespace bagualu
