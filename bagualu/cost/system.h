#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "bagualu/base/json.h"
#include "bagualu/model/layout.h"

namespace bagualu {

/// Rates of one machine, per rank; enough for a roofline where no profile has been taken.
/// Files: configs/systems/*.json, keys as the fields, with "format": "bagualu.system".
struct SystemSpec {
  std::string name;
  std::string provenance;  ///< "measured" or "datasheet"
  std::string source;      ///< which machine or sheet, what is assumed
  double fp32_flops_per_s = 0;
  double bf16_flops_per_s = 0;
  double compute_efficiency_fraction = 1;  ///< of the peaks above that GEMMs reach
  double memory_bytes_per_s = 0;
  double link_bytes_per_s = 0;  ///< between ranks of an expert-parallel group, one direction
  double d2h_bytes_per_s = 0;
  double h2d_bytes_per_s = 0;
  double encode_bytes_per_s = 0;    ///< quantise: bytes of the full copy per second
  double copy_hidden_fraction = 0;  ///< share of a host copy that runs beside compute
  int64_t launch_ns = 0;            ///< fixed time of one operator

  double flops_per_s(Dtype dtype) const {
    return dtype == Dtype::kBf16 ? bf16_flops_per_s : fp32_flops_per_s;
  }
};

/// Throws: InvalidInput for unknown or missing keys, rates outside 1e6 to 1e18.
SystemSpec system_from_json(const Json& object, const std::string& where);
SystemSpec system_from_file(const std::filesystem::path& path);

}  // namespace bagualu
