#pragma once

#include <charconv>
#include <cstdint>
#include <string_view>

#include "bagualu/model/routing_trace.h"

namespace bagualu {

/// Reads whole numbers from 0 and remembers the first thing that was wrong.
class NumberReader {
 public:
  int64_t int64(std::string_view text, int64_t max) {
    int64_t value = 0;
    const char* end = text.data() + text.size();
    const auto [stop, status] = std::from_chars(text.data(), end, value);
    if (stop != end || text.empty() || status == std::errc::invalid_argument) {
      fail(LeftOutReason::kTorn);
    } else if (status != std::errc{} || value < 0 || value > max) {
      fail(LeftOutReason::kOutOfRange);
    }
    return value;
  }
  int32_t int32(std::string_view text, int64_t max) {
    return static_cast<int32_t>(int64(text, max));
  }

  bool good() const { return good_; }
  LeftOutReason reason() const { return reason_; }

 private:
  void fail(LeftOutReason reason) {
    if (good_) reason_ = reason;
    good_ = false;
  }

  bool good_ = true;
  LeftOutReason reason_ = LeftOutReason::kTorn;
};

}  // namespace bagualu
