// INT8 copy with one scale per block of 128 elements (block_codes.h): a quarter of fp32, half of
// bf16. A storage that is not lossy stays as it is, in the same unit.
#include "bagualu/cost/block_codes.h"
#include "bagualu/cost/residency.h"
#include "bagualu/cost/residency_pricing.h"

namespace bagualu {
namespace {

int64_t encoded_bytes(int64_t bytes, int64_t lossy_element_bytes) {
  return lossy_element_bytes == 0 ? bytes : block_code_bytes(bytes, lossy_element_bytes);
}

}  // namespace

ResidencySpec quantise_residency() {
  return {.name = "quantise",
          .retire = Retire::kEncode,
          .changes_numerics = true,
          .device_bytes = encoded_bytes,
          .host_bytes = [](int64_t) { return int64_t{0}; },
          // Encoded once and decoded once; both pass over the full size.
          .exposed_ns =
              [](const ResidencyInput& input) {
                return 2 * transfer_ns(input.bytes, input.encode_bytes_per_s);
              }};
}

}  // namespace bagualu
