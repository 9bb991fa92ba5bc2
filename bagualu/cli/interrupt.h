#pragma once

namespace bagualu {

/// While one is alive, the first SIGINT or SIGTERM only sets a flag, so that what is done so far
/// can be told; the second ends the program as always. One at a time.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  /// The signal that came; 0: none, or no guard is alive.
  static int signal();
};

}  // namespace bagualu
