#include "bagualu/base/error.h"

#include <fmt/format.h>

#include <utility>

namespace bagualu {
namespace {

/// Keys and values of a file may hold line breaks; a complaint is one line all the same.
std::string one_line(const std::string& text) {
  std::string line;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      line += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      line += c;
    }
  }
  return line;
}

}  // namespace

InvalidInput::InvalidInput(std::string where, std::string field, std::string found,
                           std::string allowed)
    : std::runtime_error(
          one_line(where + ": " + field + ": found " + found + "; allowed " + allowed)),
      where_(std::move(where)),
      field_(std::move(field)),
      found_(std::move(found)),
      allowed_(std::move(allowed)) {}

namespace detail {

void throw_check_failed(const char* expression, const char* file, int line,
                        const std::string& values) {
  std::string message = fmt::format("{}:{}: check failed: {}", file, line, expression);
  if (!values.empty()) message += " [" + values + "]";
  throw InternalError(message);
}

}  // namespace detail
}  // namespace bagualu
