#include "bagualu/base/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>

#include "bagualu/base/error.h"
#include "bagualu/base/nearest.h"

namespace bagualu {
namespace {

constexpr size_t kMaxShownCharacters = 60;
// Writing a value in a message is recursive: a file of a million brackets must not end the stack.
constexpr int kMaxDepth = 100;

std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kMaxShownCharacters) text = text.substr(0, kMaxShownCharacters) + "...";
  return text;
}

/// A key in a message; the empty one is a key too.
std::string named(const std::string& key) { return key.empty() ? "\"\"" : key; }

/// "line 3, column 7" of a byte position (1-based, as the parser counts).
std::string place_of(std::string_view text, size_t byte) {
  const size_t end = std::min(byte == 0 ? 0 : byte - 1, text.size());
  const auto line = 1 + std::count(text.begin(), text.begin() + static_cast<long>(end), '\n');
  const auto newline = end == 0 ? std::string_view::npos : text.rfind('\n', end - 1);
  const auto column = newline == std::string_view::npos ? end + 1 : end - newline;
  return fmt::format("line {}, column {}", line, column);
}

std::string int_range(int64_t min, int64_t max) {
  constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
  constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();
  if (min == kLowest && max == kHighest) return "an integer";
  if (max == kHighest) return fmt::format("an integer of at least {}", min);
  if (min == kLowest) return fmt::format("an integer of at most {}", max);
  return fmt::format("an integer from {} to {}", min, max);
}

std::string number_range(double min, double max) {
  if (std::isinf(min) && std::isinf(max)) return "a number";
  if (std::isinf(max)) return fmt::format("a number of at least {}", min);
  if (std::isinf(min)) return fmt::format("a number of at most {}", max);
  return fmt::format("a number from {} to {}", min, max);
}

/// True and sets *result if value is an integer that int64 holds.
bool as_int64(const Json& value, int64_t* result) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return false;
    *result = static_cast<int64_t>(number);
    return true;
  }
  if (!value.is_number_integer()) return false;
  *result = value.get<int64_t>();
  return true;
}

}  // namespace

Json parse_json_object(std::string_view text, const std::string& where) {
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) {
    throw InvalidInput(where, "content", "nothing", "a JSON object");
  }
  // The parser keeps one of two equal keys and says nothing, so look for them on the way.
  std::vector<std::set<std::string>> keys;
  std::string repeated;
  const Json::parser_callback_t watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kMaxDepth) {
      throw InvalidInput(where, "content", "values nested too deeply",
                         fmt::format("at most {} levels", kMaxDepth));
    }
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && repeated.empty()) {
      const auto key = parsed.get<std::string>();
      if (!keys.back().insert(key).second) repeated = named(key);
    }
    return true;
  };
  Json object;
  try {
    object = Json::parse(text, watch);
  } catch (const Json::parse_error& e) {
    throw InvalidInput(where, place_of(text, e.byte), "a JSON syntax error", "valid JSON");
  } catch (const Json::exception& e) {
    throw InvalidInput(where, "content", e.what(), "valid JSON");
  }
  if (!repeated.empty()) throw InvalidInput(where, repeated, "the key twice", "each key once");
  if (!object.is_object()) throw InvalidInput(where, "content", shown(object), "a JSON object");
  return object;
}

Json read_json_file(const std::filesystem::path& path) {
  std::error_code status;
  if (std::filesystem::is_directory(path, status)) {
    throw InvalidInput(path.string(), "file", "a folder", "a JSON file");
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw InvalidInput(path.string(), "file", std::strerror(errno), "a readable JSON file");
  }
  std::ostringstream text;
  text << file.rdbuf();
  if (file.bad()) throw InvalidInput(path.string(), "file", "a read error", "a readable JSON file");
  return parse_json_object(text.str(), path.string());
}

JsonReader::JsonReader(const Json& object, std::string where)
    : object_(object), where_(std::move(where)) {
  if (!object.is_object()) throw InvalidInput(where_, "value", shown(object), "a JSON object");
}

const Json& JsonReader::raw(const std::string& key) {
  static const Json kNull;
  known_.push_back(key);
  const auto found = object_.find(key);
  return found == object_.end() ? kNull : *found;
}

bool JsonReader::has(const std::string& key) { return !raw(key).is_null(); }

void JsonReader::fail(const std::string& key, const Json& found, const std::string& allowed) const {
  throw InvalidInput(where_, key, object_.contains(key) ? shown(found) : "nothing", allowed);
}

int64_t JsonReader::int64(const std::string& key, int64_t min, int64_t max) {
  const Json& value = raw(key);
  int64_t result = 0;
  if (!as_int64(value, &result) || result < min || result > max) {
    fail(key, value, int_range(min, max));
  }
  return result;
}

int64_t JsonReader::int64_or(const std::string& key, int64_t fallback, int64_t min, int64_t max) {
  return has(key) ? int64(key, min, max) : fallback;
}

double JsonReader::number(const std::string& key, double min, double max) {
  const Json& value = raw(key);
  if (!value.is_number()) fail(key, value, number_range(min, max));
  const double result = value.get<double>();
  if (!(result >= min && result <= max)) fail(key, value, number_range(min, max));
  return result;
}

double JsonReader::number_or(const std::string& key, double fallback, double min, double max) {
  return has(key) ? number(key, min, max) : fallback;
}

bool JsonReader::boolean(const std::string& key) {
  const Json& value = raw(key);
  if (!value.is_boolean()) fail(key, value, "true or false");
  return value.get<bool>();
}

bool JsonReader::boolean_or(const std::string& key, bool fallback) {
  return has(key) ? boolean(key) : fallback;
}

std::string JsonReader::string(const std::string& key) {
  const Json& value = raw(key);
  if (!value.is_string()) fail(key, value, "a string");
  return value.get<std::string>();
}

std::string JsonReader::string_or(const std::string& key, std::string fallback) {
  return has(key) ? string(key) : std::move(fallback);
}

std::vector<int64_t> JsonReader::int64_list(const std::string& key, int64_t min, int64_t max) {
  const Json& value = raw(key);
  const std::string allowed = "a list, each " + int_range(min, max);
  if (!value.is_array()) fail(key, value, allowed);
  std::vector<int64_t> result;
  for (const Json& item : value) {
    int64_t number = 0;
    if (!as_int64(item, &number) || number < min || number > max) {
      throw InvalidInput(where_, fmt::format("{}[{}]", key, result.size()), shown(item),
                         int_range(min, max));
    }
    result.push_back(number);
  }
  return result;
}

std::vector<int64_t> JsonReader::int64_list_or(const std::string& key,
                                               std::vector<int64_t> fallback, int64_t min,
                                               int64_t max) {
  return has(key) ? int64_list(key, min, max) : std::move(fallback);
}

const Json& JsonReader::object(const std::string& key) {
  const Json& value = raw(key);
  if (!value.is_object()) fail(key, value, "a JSON object");
  return value;
}

void JsonReader::finish() const {
  for (const auto& [key, value] : object_.items()) {
    if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
    const std::string nearest = nearest_name(key, known_);
    const std::string hint = known_.empty() ? "" : ", nearest is \"" + nearest + "\"";
    throw InvalidInput(where_, named(key), "an unknown key", "known keys only" + hint);
  }
}

}  // namespace bagualu
