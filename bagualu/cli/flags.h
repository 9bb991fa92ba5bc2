#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "bagualu/cli/command_line.h"

namespace bagualu {

/// Parses the flags of one subcommand into what `app` was told. A flag given with an empty text is
/// refused unless it may stand alone: it is a script's variable that was not set.
/// Returns: false if help was asked for, which is then printed.
/// Throws:  InvalidInput(where).
bool parse_flags(CLI::App* app, const std::vector<std::string>& arguments, const std::string& where,
                 const Streams& streams);

/// Texts of flags to values; every complaint is an InvalidInput(where, flag).
int64_t parse_int_flag(const std::string& text, const std::string& where, const std::string& flag,
                       int64_t min, int64_t max = std::numeric_limits<int32_t>::max());
double parse_number_flag(const std::string& text, const std::string& where, const std::string& flag,
                         double min, double max);
/// "a,b,c"; no empty part, none twice, each among `known`.
std::vector<std::string> parse_names_flag(const std::string& text, const std::string& where,
                                          const std::string& flag,
                                          const std::vector<std::string>& known);

}  // namespace bagualu
