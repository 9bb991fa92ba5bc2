#include "bagualu/base/error.h"

#include <utility>

namespace bagualu {

InvalidInput::InvalidInput(std::string where, std::string field, std::string found,
                           std::string allowed)
    : std::runtime_error(where + ": " + field + ": found " + found + "; allowed " + allowed),
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
