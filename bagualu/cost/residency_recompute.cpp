#include "bagualu/cost/residency.h"

namespace bagualu {

ResidencySpec recompute_residency() {
  return {.name = "recompute",
          .retire = Retire::kDrop,
          .needs_rebuild = true,
          .device_bytes = [](int64_t, int64_t) { return int64_t{0}; },
          .host_bytes = [](int64_t) { return int64_t{0}; },
          .exposed_ns = [](const ResidencyInput& input) { return input.rebuild_ns; }};
}

}  // namespace bagualu
