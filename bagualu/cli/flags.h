#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace bagualu {

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
