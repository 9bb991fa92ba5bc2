#include "bagualu/sim/scenario.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "bagualu/base/config_file.h"
#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/model/hf_config.h"
#include "bagualu/model/parameters.h"
#include "bagualu/model/strategy.h"
#include "bagualu/sim/scenario_parts.h"

namespace bagualu {
namespace fs = std::filesystem;
namespace {

constexpr const char* kFormat = "bagualu.scenario";
constexpr int64_t kVersion = 1;
constexpr int64_t kMaxIterations = 100'000'000;
constexpr double kMaxSeconds = 365.0 * 24 * 3600;
constexpr double kMaxFailuresPerDay = 1e6;

/// Values of one scenario's file that may be a name, a file or an object.
class Reading {
 public:
  Reading(JsonReader* reader, fs::path folder, const std::vector<fs::path>& configs)
      : reader_(*reader), folder_(std::move(folder)), configs_(configs) {}

  Scenario read() {
    Scenario scenario;
    read_head(&scenario);
    scenario.job = job(model());
    scenario.system = system();
    scenario.budget_bytes = bytes("budget", scenario.system.device_memory_bytes);
    scenario.host_budget_bytes = bytes("host_budget", 0);
    scenario.iterations = reader_.int64_or("iterations", scenario.iterations, 1, kMaxIterations);
    scenario.seed = static_cast<uint64_t>(reader_.int64_or("seed", 0, 0));
    read_routing(&scenario);
    read_interruptions(&scenario.interruptions);
    read_scenario_policies(reader_, &scenario);
    reader_.finish();
    return scenario;
  }

 private:
  void read_head(Scenario* scenario) {
    const std::string format = reader_.string("format");
    if (format != kFormat) fail("format", fmt::format("\"{}\"", format), kFormat);
    reader_.int64("version", kVersion, kVersion);
    scenario->name = reader_.string_or("name", "");
    scenario->source = reader_.string_or("source", "");
  }

  ModelSpec model() {
    ModelSpec spec;
    const Json& value = reader_.raw("model");
    if (value.is_object()) {
      spec = value.contains("model_type") ? read_hf_config(value, inner("model")).spec
                                          : model_from_json(value, inner("model"));
    } else {
      const fs::path path = file("model", value, "models");
      spec = read_model_file(path).spec;
      if (spec.name.empty()) spec.name = path.stem().string();
    }
    spec.mtp_layers = reader_.int64_or("mtp_layers", spec.mtp_layers, 0, 16);
    check_parameters("total_parameters", total_parameters(spec));
    check_parameters("active_parameters", active_parameters(spec));
    return spec;
  }

  /// A stated number is there to be compared with the shapes.
  void check_parameters(const char* key, int64_t counted) {
    if (!reader_.has(key)) return;
    const int64_t stated = reader_.int64(key, 1);
    if (stated == counted) return;
    fail(key, fmt::format("{}", stated), fmt::format("{}, as the model's shapes give", counted));
  }

  Job job(const ModelSpec& spec) {
    const Json& value = reader_.raw("strategy");
    if (value.is_object()) return job_from_strategy(value, spec, inner("strategy"));
    return job_from_strategy_file(file("strategy", value, "strategies"), spec);
  }

  SystemSpec system() {
    const Json& value = reader_.raw("system");
    if (value.is_object()) return system_from_json(value, inner("system"));
    return system_from_file(file("system", value, "systems"));
  }

  int64_t bytes(const char* key, int64_t fallback) {
    const Json& value = reader_.raw(key);
    if (value.is_null()) return fallback;
    if (!value.is_string()) fail(key, value.dump(), "a size as text, \"64GiB\"");
    return parse_bytes(value.get<std::string>(), reader_.where(), key);
  }

  void read_routing(Scenario* scenario) {
    const Json& value = reader_.raw("routing");
    scenario->routing.seed = scenario->seed;
    if (value.is_null()) return;
    if (value.is_string()) {
      const Json kind = {{"kind", value}};
      scenario->routing = routing_shape_from_json(kind, inner("routing"));
    } else if (!value.is_object()) {
      fail("routing", value.dump(), "a kind, an object, or {\"trace\": \"FILE\"}");
    } else if (value.contains("trace")) {
      JsonReader trace(value, inner("routing"));
      scenario->trace = folder_ / trace.string("trace");
      trace.finish();
      // A trace that cannot serve this job is a mistake in the scenario, so it is found here.
      check_trace(scenario);
    } else {
      scenario->routing = routing_shape_from_json(value, inner("routing"));
    }
    if (!value.is_object() || !value.contains("seed")) scenario->routing.seed = scenario->seed;
  }

  void read_interruptions(Interruptions* interruptions) {
    if (!reader_.has("interruptions")) return;
    JsonReader reader(reader_.object("interruptions"), inner("interruptions"));
    Interruptions& i = *interruptions;
    i.restart_s = seconds(&reader, "restart", i.restart_s);
    i.checkpoint_interval =
        reader.int64_or("checkpoint_interval", i.checkpoint_interval, 1, kMaxIterations);
    i.checkpoint_s = seconds(&reader, "checkpoint", i.checkpoint_s);
    i.failures_per_day =
        reader.number_or("failures_per_day", i.failures_per_day, 0, kMaxFailuresPerDay);
    reader.finish();
  }

  double seconds(JsonReader* reader, const char* key, double fallback) {
    const Json& value = reader->raw(key);
    if (value.is_null()) return fallback;
    if (value.is_string()) return parse_seconds(value.get<std::string>(), reader->where(), key);
    throw InvalidInput(reader->where(), key, value.dump(), kTimeAllowed);
  }

  fs::path file(const char* key, const Json& value, const char* kind) {
    if (!value.is_string()) {
      fail(key, value.is_null() ? "nothing" : value.dump(), "a name, a file or an object");
    }
    const std::string text = value.get<std::string>();
    std::error_code status;
    if (!text.empty() && fs::is_regular_file(folder_ / text, status)) return folder_ / text;
    std::vector<fs::path> folders = {folder_ / ".." / kind};
    for (const fs::path& root : configs_) folders.push_back(root / kind);
    return resolve_config(text, folders, reader_.where(), key);
  }

  std::string inner(const char* key) const { return reader_.where() + "." + key; }

  [[noreturn]] void fail(const char* key, std::string found, std::string allowed) const {
    throw InvalidInput(reader_.where(), key, std::move(found), std::move(allowed));
  }

  JsonReader& reader_;
  const fs::path folder_;
  const std::vector<fs::path>& configs_;
};

}  // namespace

double parse_seconds(std::string_view text, const std::string& where, const std::string& field) {
  constexpr std::array<std::pair<std::string_view, double>, 5> kUnits = {
      {{"ms", 1e-3}, {"s", 1}, {"min", 60}, {"h", 3600}, {"d", 86400}}};
  const size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
  std::string_view unit = text.substr(digits);
  unit.remove_prefix(std::min(unit.find_first_not_of(' '), unit.size()));
  double number = 0;
  const char* end = text.data() + digits;
  const auto [stop, status] = std::from_chars(text.data(), end, number);
  const auto* known = std::find_if(kUnits.begin(), kUnits.end(),
                                   [&](const auto& entry) { return entry.first == unit; });
  if (digits == 0 || status != std::errc{} || stop != end || known == kUnits.end() ||
      number * known->second > kMaxSeconds) {
    throw InvalidInput(where, field, fmt::format("\"{}\"", text), kTimeAllowed);
  }
  return number * known->second;
}

Scenario scenario_from_json(const Json& object, const fs::path& folder, const std::string& where,
                            const std::vector<fs::path>& configs) {
  JsonReader reader(object, where);
  return Reading(&reader, folder, configs).read();
}

Scenario scenario_from_file(const fs::path& path, const std::vector<fs::path>& configs) {
  Scenario scenario =
      scenario_from_json(read_json_file(path), path.parent_path(), path.string(), configs);
  if (scenario.name.empty()) scenario.name = path.stem().string();
  return scenario;
}

}  // namespace bagualu
