// Residencies: what may happen to a unit of saved activations between its last forward use and its
// first backward use. A registered list, not a closed enum: one more residency is one file that
// defines a ResidencySpec, and one line in residency.cpp.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace bagualu {

/// What the timeline does with a storage after its last forward use (and undoes before backward).
enum class Retire : uint8_t {
  kKeep,     ///< stays in device memory
  kDrop,     ///< freed; its producer runs again in backward
  kOffload,  ///< copied to the host arena, freed when the copy has been drained, reloaded
  kEncode,   ///< its lossy storages are replaced by a smaller copy in device memory, decoded before
             ///< backward; the others stay
};

/// What the price of a residency is computed from; all of one unit.
struct ResidencyInput {
  int64_t bytes = 0;       ///< full size
  int64_t rebuild_ns = 0;  ///< forward time of the producer
  double d2h_bytes_per_s = 0;
  double h2d_bytes_per_s = 0;
  double hidden_fraction = 0;  ///< share of a copy that runs beside compute, 0..1
  double encode_bytes_per_s = 0;
};

struct ResidencySpec {
  std::string_view name;
  Retire retire = Retire::kKeep;
  bool changes_numerics = false;  ///< off unless the user allows it, and labelled in every output
  bool needs_rebuild = false;     ///< only for units whose producer may run again
  /// Still resident between the two uses, of a storage with elements of this size (0: not lossy).
  int64_t (*device_bytes)(int64_t bytes, int64_t lossy_element_bytes) = nullptr;
  int64_t (*host_bytes)(int64_t bytes) = nullptr;
  int64_t (*exposed_ns)(const ResidencyInput& input) = nullptr;
};

using ResidencyId = uint8_t;

/// The registered residencies; an id is the index in this list. Ids of the first three are fixed.
const std::vector<ResidencySpec>& residencies();
inline constexpr ResidencyId kSave = 0;
inline constexpr ResidencyId kRecompute = 1;
inline constexpr ResidencyId kOffload = 2;

/// Returns: the id of a name.
/// Throws: InvalidInput listing the registered names.
ResidencyId residency_from_name(std::string_view name, std::string_view where);

}  // namespace bagualu
