#include "bagualu/cost/system.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

// Below a megabyte or a megaflop per second times overflow, and no machine is meant.
constexpr double kLeastRate = 1e6;
constexpr double kLargestRate = 1e18;
constexpr int64_t kLargestLaunchNs = 1'000'000'000;
constexpr int64_t kLargestMemory = int64_t{1} << 50;
// Defaults of the two attention efficiencies, in shares of the class they follow: what fused
// kernels reach of large GEMMs on the machines of configs/systems.
constexpr double kAttentionOfGemmFraction = 0.8;
constexpr double kAttentionBackwardFraction = 0.9;

void expect(const std::string& where, const std::string& field, const std::string& found,
            const std::string& allowed) {
  if (found != allowed) throw InvalidInput(where, field, found, allowed);
}

void read_job_rates(JsonReader& reader, SystemSpec& system) {
  const auto fraction = [&](const char* key, double fallback) {
    return reader.number_or(key, fallback, 0.001, 1.0);
  };
  SystemSpec& s = system;
  s.fp8_flops_per_s =
      reader.number_or("fp8_flops_per_s", s.bf16_flops_per_s, kLeastRate, kLargestRate);
  s.gemm_efficiency_fraction = fraction("gemm_efficiency_fraction", s.compute_efficiency_fraction);
  s.grouped_gemm_efficiency_fraction =
      fraction("grouped_gemm_efficiency_fraction", s.gemm_efficiency_fraction);
  s.attention_forward_efficiency_fraction =
      fraction("attention_forward_efficiency_fraction",
               kAttentionOfGemmFraction * s.gemm_efficiency_fraction);
  s.attention_backward_efficiency_fraction =
      fraction("attention_backward_efficiency_fraction",
               kAttentionBackwardFraction * s.attention_forward_efficiency_fraction);
  s.memory_efficiency_fraction =
      fraction("memory_efficiency_fraction", s.memory_efficiency_fraction);
  s.optimizer_efficiency_fraction =
      fraction("optimizer_efficiency_fraction", s.optimizer_efficiency_fraction);
  s.compute_units = reader.int64_or("compute_units", s.compute_units, 0, int64_t{1} << 20);
  s.node_size = reader.int64_or("node_size", s.node_size, 1, int64_t{1} << 20);
  s.node_link_bytes_per_s =
      reader.number_or("node_link_bytes_per_s", s.link_bytes_per_s, kLeastRate, kLargestRate);
  s.collective_efficiency_fraction =
      fraction("collective_efficiency_fraction", s.collective_efficiency_fraction);
  s.collective_latency_ns =
      reader.int64_or("collective_latency_ns", s.collective_latency_ns, 0, kLargestLaunchNs);
  s.comm_overlap_fraction =
      reader.number_or("comm_overlap_fraction", s.comm_overlap_fraction, 0.0, 1.0);
  s.step_overhead_ns =
      reader.int64_or("step_overhead_ns", s.step_overhead_ns, 0, 60 * kLargestLaunchNs);
  if (reader.has("measured_operators")) {
    s.measured_operators = measured_operators_from_json(reader.object("measured_operators"),
                                                        reader.where() + ".measured_operators");
  }
}

}  // namespace

SystemSpec system_from_json(const Json& object, const std::string& where) {
  JsonReader reader(object, where);
  expect(where, "format", reader.string("format"), "bagualu.system");
  reader.int64("version", 1, 1);
  const auto rate = [&](const char* key) { return reader.number(key, kLeastRate, kLargestRate); };
  SystemSpec system;
  system.name = reader.string("name");
  system.provenance = reader.string("provenance");
  const std::array<std::string_view, 4> known = {"measured", "datasheet", "fitted", "derived"};
  if (std::find(known.begin(), known.end(), system.provenance) == known.end()) {
    throw InvalidInput(where, "provenance", system.provenance,
                       fmt::format("{}", fmt::join(known, ", ")));
  }
  system.source = reader.string_or("source", "");
  system.fp32_flops_per_s = rate("fp32_flops_per_s");
  system.bf16_flops_per_s = rate("bf16_flops_per_s");
  system.compute_efficiency_fraction = reader.number("compute_efficiency_fraction", 0.001, 1.0);
  system.memory_bytes_per_s = rate("memory_bytes_per_s");
  system.link_bytes_per_s = rate("link_bytes_per_s");
  system.d2h_bytes_per_s = rate("d2h_bytes_per_s");
  system.h2d_bytes_per_s = rate("h2d_bytes_per_s");
  system.encode_bytes_per_s = rate("encode_bytes_per_s");
  system.copy_hidden_fraction = reader.number("copy_hidden_fraction", 0.0, 1.0);
  system.launch_ns = reader.int64("launch_ns", 0, kLargestLaunchNs);
  system.device_memory_bytes = reader.int64_or("device_memory_bytes", 0, 0, kLargestMemory);
  read_job_rates(reader, system);
  reader.raw("fit");  // of a fitted file: where its numbers come from, for people
  reader.finish();
  return system;
}

SystemSpec system_from_file(const std::filesystem::path& path) {
  return system_from_json(read_json_file(path), path.string());
}

Json to_json(const SystemSpec& s) {
  return {{"format", "bagualu.system"},
          {"version", 1},
          {"name", s.name},
          {"provenance", s.provenance},
          {"source", s.source},
          {"fp32_flops_per_s", s.fp32_flops_per_s},
          {"bf16_flops_per_s", s.bf16_flops_per_s},
          {"compute_efficiency_fraction", s.compute_efficiency_fraction},
          {"memory_bytes_per_s", s.memory_bytes_per_s},
          {"link_bytes_per_s", s.link_bytes_per_s},
          {"d2h_bytes_per_s", s.d2h_bytes_per_s},
          {"h2d_bytes_per_s", s.h2d_bytes_per_s},
          {"encode_bytes_per_s", s.encode_bytes_per_s},
          {"copy_hidden_fraction", s.copy_hidden_fraction},
          {"launch_ns", s.launch_ns},
          {"device_memory_bytes", s.device_memory_bytes},
          {"fp8_flops_per_s", s.fp8_flops_per_s},
          {"gemm_efficiency_fraction", s.gemm_efficiency_fraction},
          {"grouped_gemm_efficiency_fraction", s.grouped_gemm_efficiency_fraction},
          {"attention_forward_efficiency_fraction", s.attention_forward_efficiency_fraction},
          {"attention_backward_efficiency_fraction", s.attention_backward_efficiency_fraction},
          {"memory_efficiency_fraction", s.memory_efficiency_fraction},
          {"optimizer_efficiency_fraction", s.optimizer_efficiency_fraction},
          {"compute_units", s.compute_units},
          {"node_size", s.node_size},
          {"node_link_bytes_per_s", s.node_link_bytes_per_s},
          {"collective_efficiency_fraction", s.collective_efficiency_fraction},
          {"collective_latency_ns", s.collective_latency_ns},
          {"comm_overlap_fraction", s.comm_overlap_fraction},
          {"step_overhead_ns", s.step_overhead_ns},
          {"measured_operators", to_json(s.measured_operators)}};
}

}  // namespace bagualu
