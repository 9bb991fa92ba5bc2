#include "bagualu/runtime/slow_link.h"

#include <algorithm>

#include "bagualu/base/error.h"

namespace bagualu {

SlowLink::SlowLink(SlowLinkOptions options) : options_(options) {
  BGL_CHECK(options.bytes_per_s >= 0 && options.latency_ns >= 0, options.bytes_per_s,
            options.latency_ns);
}

int64_t SlowLink::take(int64_t now_ns, int64_t size_bytes) {
  if (!is_on()) return 0;
  const double seconds =
      static_cast<double>(size_bytes) / static_cast<double>(options_.bytes_per_s);
  free_ns_ = std::max(now_ns, free_ns_) + static_cast<int64_t>(seconds * 1e9);
  return free_ns_ + options_.latency_ns;
}

}  // namespace bagualu
