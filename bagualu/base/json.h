#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace bagualu {

/// Keeps the order of keys, so that files we write are stable byte for byte.
using Json = nlohmann::ordered_json;

/// Parses a JSON object from text.
/// Throws:  InvalidInput(where) with line and column on a syntax error, on a repeated key, and when
///          the text is empty or holds something that is not an object.
Json parse_json_object(std::string_view text, const std::string& where);

/// As parse_json_object, from a file. Throws InvalidInput too when it is missing or unreadable.
Json read_json_file(const std::filesystem::path& path);

/// Typed, checked access to one JSON object; every complaint names `where` and the key.
///
/// A getter marks its key as known. The `_or` variants return `fallback` when the key is absent or
/// null. Call finish() after the last getter: a key nobody asked for is a typing mistake.
/// Owns:    nothing; the object outlives the reader.
/// Throws:  InvalidInput from every getter on a missing key, a wrong type or a value out of range.
class JsonReader {
 public:
  /// Requires: the object outlives this reader.
  JsonReader(const Json& object, std::string where);

  bool has(const std::string& key);  ///< present and not null
  int64_t int64(const std::string& key, int64_t min = kMin, int64_t max = kMax);
  int64_t int64_or(const std::string& key, int64_t fallback, int64_t min = kMin,
                   int64_t max = kMax);
  double number(const std::string& key, double min = -kInf, double max = kInf);
  double number_or(const std::string& key, double fallback, double min = -kInf, double max = kInf);
  bool boolean(const std::string& key);
  bool boolean_or(const std::string& key, bool fallback);
  std::string string(const std::string& key);
  std::string string_or(const std::string& key, std::string fallback);
  std::vector<int64_t> int64_list(const std::string& key, int64_t min = kMin, int64_t max = kMax);
  std::vector<int64_t> int64_list_or(const std::string& key, std::vector<int64_t> fallback,
                                     int64_t min = kMin, int64_t max = kMax);
  /// Any value, unchecked; null when absent.
  const Json& raw(const std::string& key);
  /// A nested object. Its own reader should use `where() + "." + key` as its place.
  const Json& object(const std::string& key);

  /// Throws InvalidInput naming the first unknown key and the nearest known one.
  void finish() const;

  const std::string& where() const { return where_; }

 private:
  static constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  static constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  static constexpr double kInf = std::numeric_limits<double>::infinity();

  [[noreturn]] void fail(const std::string& key, const Json& found,
                         const std::string& allowed) const;

  const Json& object_;
  std::string where_;
  std::vector<std::string> known_;
};

}  // namespace bagualu
