#pragma once

#include <cstdint>

namespace bagualu {

/// Stated speed of a link, for measurements on a machine whose ranks share memory.
/// Units: 0 bytes_per_s = as fast as it is.
struct SlowLinkOptions {
  int64_t bytes_per_s = 0;
  int64_t latency_ns = 0;
};

/// Clock of an emulated link: says when a transfer counts as done. Moves no bytes, waits for
/// nothing. A link carries one transfer at a time, in the order of issue; latencies overlap.
class SlowLink {
 public:
  explicit SlowLink(SlowLinkOptions options);

  bool is_on() const { return options_.bytes_per_s > 0; }
  /// Takes the link for `size_bytes`, issued at `now_ns`, after all that was taken before.
  /// Returns: when the transfer counts as done; 0 if the link is off.
  int64_t take(int64_t now_ns, int64_t size_bytes);

 private:
  SlowLinkOptions options_;
  int64_t free_ns_ = 0;
};

}  // namespace bagualu
