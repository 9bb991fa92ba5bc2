#include "bagualu/runtime/transfer.h"

#include <fmt/core.h>

#include <utility>

namespace bagualu {

std::string_view direction_name(Direction direction) {
  return direction == Direction::kD2H ? "D2H" : "H2D";
}

std::string transfer_text(Direction direction, std::string_view label) {
  return fmt::format("{} copy of {}", direction_name(direction),
                     label.empty() ? "(no label)" : label);
}

std::string transfer_failure_text(Direction direction, std::string_view label,
                                  std::string_view cause) {
  return fmt::format("{} failed: {}", transfer_text(direction, label), cause);
}

void TransferEngine::set_recording(bool on) {
  const std::lock_guard lock(records_mutex_);
  recording_ = on;
  if (!on) records_.clear();
}

std::vector<CopyRecord> TransferEngine::take_records() {
  const std::lock_guard lock(records_mutex_);
  return std::exchange(records_, {});
}

void TransferEngine::record(const CopyRecord& copy) {
  const std::lock_guard lock(records_mutex_);
  if (recording_) records_.push_back(copy);
}

}  // namespace bagualu
