#include "bagualu/base/units.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

std::string_view strip(std::string_view text) {
  const auto first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

constexpr std::array<std::pair<std::string_view, int64_t>, 10> kUnits = {{
    {"", 1},
    {"B", 1},
    {"KiB", kKiB},
    {"MiB", kMiB},
    {"GiB", kGiB},
    {"TiB", kGiB* kKiB},
    {"KB", 1000},
    {"MB", 1000 * 1000},
    {"GB", 1000 * 1000 * 1000},
    {"TB", int64_t{1000} * 1000 * 1000 * 1000},
}};

}  // namespace

int64_t round_up(int64_t n, int64_t granularity) {
  BGL_CHECK(n >= 0 && granularity > 0, n, granularity);
  BGL_CHECK(n <= std::numeric_limits<int64_t>::max() - (granularity - 1), n, granularity);
  return (n + granularity - 1) / granularity * granularity;
}

std::string format_bytes(int64_t bytes) {
  const double magnitude = std::abs(static_cast<double>(bytes));
  constexpr std::array<std::pair<const char*, int64_t>, 4> kScales = {
      {{"TiB", kGiB * kKiB}, {"GiB", kGiB}, {"MiB", kMiB}, {"KiB", kKiB}}};
  for (const auto& [unit, scale] : kScales) {
    // 1023.97 KiB would print as "1024.0 KiB", so the next unit starts where rounding reaches it.
    if (magnitude >= static_cast<double>(scale) * (1.0 - 0.05 / 1024.0) && magnitude >= 1024.0) {
      return fmt::format("{:.1f} {}", static_cast<double>(bytes) / static_cast<double>(scale),
                         unit);
    }
  }
  return fmt::format("{} B", bytes);
}

std::string format_ns(int64_t ns) {
  const double value = static_cast<double>(ns);
  const double magnitude = std::abs(value);
  if (magnitude < 1e3) return fmt::format("{} ns", ns);
  if (magnitude < 1e6) return fmt::format("{:.3g} us", value / 1e3);
  if (magnitude < 1e9) return fmt::format("{:.3g} ms", value / 1e6);
  return fmt::format("{:.2f} s", value / 1e9);
}

int64_t parse_bytes(std::string_view text, const std::string& where, const std::string& field) {
  const auto refuse = [&]() -> InvalidInput {
    return InvalidInput(where, field, fmt::format("\"{}\"", text),
                        "a positive number of bytes with an optional unit (B KiB MiB GiB TiB, "
                        "KB MB GB TB), as 96MiB");
  };
  const std::string_view whole = strip(text);
  const auto digits = whole.find_first_not_of("0123456789.");
  const std::string_view number = whole.substr(0, digits);
  const std::string_view unit =
      digits == std::string_view::npos ? std::string_view{} : strip(whole.substr(digits));
  int64_t scale = 0;
  for (const auto& [name, bytes] : kUnits) {
    if (name == unit) scale = bytes;
  }
  if (scale == 0 || number.empty()) throw refuse();

  int64_t result = 0;
  const char* end = number.data() + number.size();
  if (number.find('.') == std::string_view::npos) {
    const auto [stop, status] = std::from_chars(number.data(), end, result);
    if (status != std::errc{} || stop != end) throw refuse();
    if (__builtin_mul_overflow(result, scale, &result)) throw refuse();
  } else {
    double fraction = 0.0;
    const auto [stop, status] = std::from_chars(number.data(), end, fraction);
    if (status != std::errc{} || stop != end) throw refuse();
    const double bytes = fraction * static_cast<double>(scale);
    if (bytes >= 9.2e18) throw refuse();
    result = static_cast<int64_t>(bytes);
  }
  if (result < 1) throw refuse();
  return result;
}

}  // namespace bagualu
