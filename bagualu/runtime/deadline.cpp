#include "bagualu/runtime/deadline.h"

#include <fmt/core.h>

#include <utility>

#include "bagualu/base/units.h"

namespace bagualu {

DeadlineExceeded::DeadlineExceeded(const std::string& awaited, std::string label,
                                   int64_t timeout_ns)
    : std::runtime_error(fmt::format("{} did not end within {}", awaited, format_ns(timeout_ns))),
      label_(std::move(label)),
      timeout_ns_(timeout_ns) {}

}  // namespace bagualu
