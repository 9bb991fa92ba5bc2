#include <algorithm>
#include <cmath>

#include "bagualu/cost/residency.h"
#include "bagualu/cost/residency_pricing.h"

namespace bagualu {
namespace {

int64_t exposed_copies_ns(const ResidencyInput& input) {
  const int64_t both = transfer_ns(input.bytes, input.d2h_bytes_per_s) +
                       transfer_ns(input.bytes, input.h2d_bytes_per_s);
  const double exposed_fraction = 1.0 - std::clamp(input.hidden_fraction, 0.0, 1.0);
  return static_cast<int64_t>(std::ceil(static_cast<double>(both) * exposed_fraction));
}

}  // namespace

ResidencySpec offload_residency() {
  return {.name = "offload",
          .retire = Retire::kOffload,
          .device_bytes = [](int64_t, int64_t) { return int64_t{0}; },
          .host_bytes = [](int64_t bytes) { return bytes; },
          .exposed_ns = exposed_copies_ns};
}

}  // namespace bagualu
