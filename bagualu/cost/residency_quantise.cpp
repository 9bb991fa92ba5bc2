// INT8 copy with one scale per block: per 128 elements of 4 bytes, 128 code bytes and one fp32
// scale. Elements are fp32: a spec knows bytes only, and a storage of bf16 would need two codes per
// 4 bytes, so the runtime takes this residency in fp32 runs only.
#include "bagualu/base/units.h"
#include "bagualu/cost/residency.h"
#include "bagualu/cost/residency_pricing.h"

namespace bagualu {
namespace {

constexpr int64_t kElementBytes = 4;
constexpr int64_t kBlockElements = 128;
constexpr int64_t kScaleBytes = 4;

int64_t encoded_bytes(int64_t bytes) {
  const int64_t elements = round_up(bytes, kElementBytes) / kElementBytes;
  const int64_t blocks = round_up(elements, kBlockElements) / kBlockElements;
  return elements + blocks * kScaleBytes;
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
