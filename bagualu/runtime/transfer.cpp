#include "bagualu/runtime/transfer.h"

#include <fmt/core.h>

#include <utility>

#include "bagualu/base/units.h"

namespace bagualu {

std::string_view direction_name(Direction direction) {
  return direction == Direction::kD2H ? "D2H" : "H2D";
}

std::string transfer_failure_text(Direction direction, std::string_view label,
                                  std::string_view cause) {
  return fmt::format("{} copy of {} failed: {}", direction_name(direction),
                     label.empty() ? "(no label)" : label, cause);
}

DeadlineExceeded::DeadlineExceeded(Direction direction, std::string label, int64_t timeout_ns)
    : std::runtime_error(fmt::format("{} copy of {} did not end within {}",
                                     direction_name(direction),
                                     label.empty() ? "(no label)" : label, format_ns(timeout_ns))),
      direction_(direction),
      label_(std::move(label)) {}

}  // namespace bagualu
