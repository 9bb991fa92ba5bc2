#include "bagualu/cost/system.h"

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

// Below a megabyte or a megaflop per second times overflow, and no machine is meant.
constexpr double kLeastRate = 1e6;
constexpr double kLargestRate = 1e18;
constexpr int64_t kLargestLaunchNs = 1'000'000'000;

void expect(const std::string& where, const std::string& field, const std::string& found,
            const std::string& allowed) {
  if (found != allowed) throw InvalidInput(where, field, found, allowed);
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
  if (system.provenance != "measured" && system.provenance != "datasheet") {
    throw InvalidInput(where, "provenance", system.provenance, "measured, datasheet");
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
  reader.finish();
  return system;
}

SystemSpec system_from_file(const std::filesystem::path& path) {
  return system_from_json(read_json_file(path), path.string());
}

}  // namespace bagualu
