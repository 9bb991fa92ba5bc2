#include "bagualu/cli/flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "bagualu/base/error.h"

namespace bagualu {

namespace {

/// True if all of `text` is one number, which lands in *value.
template <class T>
bool parse_all(const std::string& text, T* value) {
  const char* end = text.data() + text.size();
  const auto [stop, status] = std::from_chars(text.data(), end, *value);
  return status == std::errc{} && stop == end;
}

}  // namespace

bool parse_flags(CLI::App* app, const std::vector<std::string>& arguments, const std::string& where,
                 const Streams& streams) {
  // CLI11 takes the last argument first.
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
  try {
    app->parse(std::move(reversed));
  } catch (const CLI::CallForHelp&) {
    streams.out << app->help();
    return false;
  } catch (const CLI::ParseError& error) {
    throw InvalidInput(where, "flags", error.what(), "what `" + where + " --help` lists");
  }
  for (const CLI::Option* option : app->get_options()) {
    for (const std::string& value : option->results()) {
      if (!value.empty() || option->get_items_expected_min() == 0) continue;
      throw InvalidInput(where, option->get_name(), "nothing", "a value behind the flag");
    }
  }
  return true;
}
int64_t parse_int_flag(const std::string& text, const std::string& where, const std::string& flag,
                       int64_t min, int64_t max) {
  int64_t value = 0;
  if (parse_all(text, &value) && value >= min && value <= max) return value;
  throw InvalidInput(where, flag, fmt::format("\"{}\"", text),
                     fmt::format("an integer from {} to {}", min, max));
}

double parse_number_flag(const std::string& text, const std::string& where, const std::string& flag,
                         double min, double max) {
  double value = 0;
  if (parse_all(text, &value) && value >= min && value <= max) return value;
  throw InvalidInput(where, flag, fmt::format("\"{}\"", text),
                     fmt::format("a number from {} to {}", min, max));
}

std::vector<std::string> parse_names_flag(const std::string& text, const std::string& where,
                                          const std::string& flag,
                                          const std::vector<std::string>& known) {
  std::vector<std::string> names;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string name = text.substr(begin, end - begin);
    const bool fresh = std::find(names.begin(), names.end(), name) == names.end();
    if (!fresh || std::find(known.begin(), known.end(), name) == known.end()) {
      throw InvalidInput(where, flag, fmt::format("\"{}\"{}", name, fresh ? "" : " twice"),
                         fmt::format("any of {}", fmt::join(known, ",")));
    }
    names.push_back(name);
    begin = end + 1;
  }
  return names;
}

}  // namespace bagualu
