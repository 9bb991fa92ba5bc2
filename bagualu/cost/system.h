#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "bagualu/base/json.h"
#include "bagualu/cost/measured_operators.h"
#include "bagualu/model/layout.h"

namespace bagualu {

/// Rates of one machine, per rank; enough for a roofline where no profile has been taken.
/// Files: configs/systems/*.json, keys as the fields, with "format": "bagualu.system". Those of
/// the second group are optional: they price whole jobs (cost/job_cost.h), where operator classes
/// differ and ranks are joined by two kinds of links.
struct SystemSpec {
  std::string name;
  /// "measured", "datasheet", "fitted", or "derived" (computed from published results, see source)
  std::string provenance;
  std::string source;  ///< which machine or sheet, what is assumed
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

  int64_t device_memory_bytes = 0;  ///< as the driver reports it; 0: unknown
  double fp8_flops_per_s = 0;       ///< default: the bf16 peak
  /// Efficiencies of operator classes, of the peak or of the bandwidth; large shapes. A GEMM's time
  /// is its arithmetic plus its traffic, so small ones reach less.
  double gemm_efficiency_fraction = 0;                ///< default: compute_efficiency_fraction
  double grouped_gemm_efficiency_fraction = 0;        ///< experts; default: that of GEMMs
  double attention_forward_efficiency_fraction = 0;   ///< fused; default: 0.8 of that of GEMMs
  double attention_backward_efficiency_fraction = 0;  ///< default: 0.9 of the forward's
  double memory_efficiency_fraction = 0.7;
  double optimizer_efficiency_fraction =
      0.8;  ///< of the bandwidth, by the optimizer's long vectors
  /// Multiprocessors that a GEMM's output tiles are dealt to; 0: the last round of tiles is not
  /// looked at.
  int64_t compute_units = 0;
  int64_t node_size = 8;             ///< ranks that the fast link joins
  double node_link_bytes_per_s = 0;  ///< inside a node, one direction; default: link_bytes_per_s
  double collective_efficiency_fraction = 0.75;  ///< of both links' rates
  int64_t collective_latency_ns = 20'000;        ///< fixed time of one collective
  /// Of the shorter of compute and communication that the framework runs side by side: what is
  /// hidden; 1: all of it.
  double comm_overlap_fraction = 0.8;
  int64_t step_overhead_ns = 0;  ///< fixed time of one step: data, logging, synchronisation
  /// In place of the efficiencies of the classes that it has.
  MeasuredOperators measured_operators;

  double flops_per_s(Dtype dtype) const {
    return dtype == Dtype::kBf16 ? bf16_flops_per_s : fp32_flops_per_s;
  }
};

/// Throws: InvalidInput for unknown or missing keys, rates outside 1e6 to 1e18.
SystemSpec system_from_json(const Json& object, const std::string& where);
SystemSpec system_from_file(const std::filesystem::path& path);

/// The file that system_from_json() reads back as `system`.
Json to_json(const SystemSpec& system);

}  // namespace bagualu
