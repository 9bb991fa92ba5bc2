#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace bagualu {

/// A wait gave up. What was waited for may still be under way, so its memory must not be freed yet.
class DeadlineExceeded : public std::runtime_error {
 public:
  /// Text: "AWAITED did not end within TIMEOUT". `label` names the storage or the action.
  DeadlineExceeded(const std::string& awaited, std::string label, int64_t timeout_ns);

  const std::string& label() const { return label_; }
  int64_t timeout_ns() const { return timeout_ns_; }

 private:
  std::string label_;
  int64_t timeout_ns_;
};

}  // namespace bagualu
