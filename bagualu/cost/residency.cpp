#include "bagualu/cost/residency.h"

#include <string>

#include "bagualu/base/error.h"

namespace bagualu {

ResidencySpec save_residency();
ResidencySpec recompute_residency();
ResidencySpec offload_residency();
ResidencySpec quantise_residency();

const std::vector<ResidencySpec>& residencies() {
  // The first three have fixed ids; add yours at the end.
  static const std::vector<ResidencySpec> kSpecs = {
      save_residency(),
      recompute_residency(),
      offload_residency(),
      quantise_residency(),
  };
  return kSpecs;
}

ResidencyId residency_from_name(std::string_view name, std::string_view where) {
  std::string allowed;
  for (size_t r = 0; r < residencies().size(); ++r) {
    if (residencies()[r].name == name) return static_cast<ResidencyId>(r);
    allowed += (r == 0 ? "" : ", ") + std::string(residencies()[r].name);
  }
  throw InvalidInput(std::string(where), "residency", std::string(name), allowed);
}

}  // namespace bagualu
