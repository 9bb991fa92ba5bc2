#pragma once

#include <chrono>
#include <cstdint>

namespace bagualu {

/// ns of the steady clock, which all processes of a machine share.
inline int64_t steady_now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

}  // namespace bagualu
