#pragma once

#include <fmt/core.h>

#include <stdexcept>
#include <string>

namespace bagualu {

/// Bad input from outside (a file, a flag, a trace): says what was found where, and what is
/// allowed. Ensures: what() is "WHERE: FIELD: found FOUND; allowed ALLOWED", one line. Programs end
/// with exit code 2 on it. Caught only in main and in the Python bindings.
class InvalidInput : public std::runtime_error {
 public:
  InvalidInput(std::string where, std::string field, std::string found, std::string allowed);

  const std::string& where() const { return where_; }
  const std::string& field() const { return field_; }
  const std::string& found() const { return found_; }
  const std::string& allowed() const { return allowed_; }

 private:
  std::string where_;
  std::string field_;
  std::string found_;
  std::string allowed_;
};

/// A bug in this program; thrown by BGL_CHECK.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

namespace detail {

[[noreturn]] void throw_check_failed(const char* expression, const char* file, int line,
                                     const std::string& values);

template <class... Values>
std::string join_values(const Values&... values) {
  std::string joined;
  ((joined += fmt::format("{}{}", joined.empty() ? "" : ", ", values)), ...);
  return joined;
}

}  // namespace detail
}  // namespace bagualu

/// Throws InternalError unless `cond` holds. The values behind it appear in the message, in order.
/// Stays on in release builds: a wrong plan would otherwise show as silently wrong gradients.
#define BGL_CHECK(cond, ...)                                                              \
  do {                                                                                    \
    if (!(cond)) [[unlikely]] {                                                           \
      ::bagualu::detail::throw_check_failed(#cond, __FILE__, __LINE__,                    \
                                            ::bagualu::detail::join_values(__VA_ARGS__)); \
    }                                                                                     \
  } while (false)
