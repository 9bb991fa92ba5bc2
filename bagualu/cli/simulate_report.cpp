#include "bagualu/cli/simulate_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "bagualu/model/parameters.h"

namespace bagualu {
namespace {

constexpr int64_t kFormatVersion = 1;

/// The p-th of 100 parts of the times, by the nearest rank.
int64_t percentile(const std::vector<int64_t>& sorted, int64_t p) {
  if (sorted.empty()) return 0;
  const auto count = static_cast<int64_t>(sorted.size());
  const int64_t rank = (count * p + 99) / 100;
  return sorted[static_cast<size_t>(std::clamp<int64_t>(rank - 1, 0, count - 1))];
}

/// Null where there is nothing to tell: 0 would be read as a measurement.
Json or_null(double value) { return std::isfinite(value) && value > 0 ? Json(value) : Json(); }

Json policy_json(const SimulatedScenario& scenario, size_t index) {
  const SimulatedPolicy& policy = scenario.policies[index];
  const PolicyFigures figures = figures_of(scenario, index);
  Json json = to_json(policy.run);
  json["complete"] = policy.complete;
  json["relative"] = or_null(figures.relative);
  json["iteration_ns"] = {{"p50", figures.p50_ns}, {"p99", figures.p99_ns}};
  json["lost_hours"] = figures.lost_hours;
  json["most_mitigated_ranks"] = figures.most_mitigated_ranks;
  json["can_run"] = !figures.cannot_run;
  json["missing_bytes"] = figures.missing_bytes;
  return json;
}

Json scenario_json(const SimulatedScenario& simulated) {
  const Scenario& scenario = simulated.scenario;
  const Job& job = scenario.job;
  const Interruptions& stops = scenario.interruptions;
  Json json;
  json["name"] = scenario.name;
  json["source"] = scenario.source;
  json["model"] = {{"name", job.model.name},
                   {"parameters", total_parameters(job.model)},
                   {"active_parameters", active_parameters(job.model)}};
  json["devices"] = job.layout.world_size;
  json["layout"] = layout_text(job.layout);
  json["pipeline"] = std::string(pipeline_kind_name(job.pipeline));
  json["seq"] = job.seq;
  json["micro_batch_size"] = job.micro_batch_size;
  json["microbatches"] = job.microbatches;
  json["system"] = {{"name", scenario.system.name},
                    {"provenance", scenario.system.provenance},
                    {"source", scenario.system.source}};
  json["budget_bytes"] = scenario.budget_bytes;
  json["routing"] = scenario.trace.empty() ? to_json(scenario.routing)
                                           : Json({{"trace", scenario.trace.string()}});
  json["iterations"] = simulated.iterations;
  json["seed"] = scenario.seed;
  json["interruptions"] = {{"restart_s", stops.restart_s},
                           {"checkpoint_interval", stops.checkpoint_interval},
                           {"checkpoint_s", stops.checkpoint_s},
                           {"failures_per_day", stops.failures_per_day}};
  json["runs"] = Json::array();
  for (size_t i = 0; i < simulated.policies.size(); ++i) {
    json["runs"].push_back(policy_json(simulated, i));
  }
  return json;
}

/// Non-finite numbers become null: a text with NaN in it is no JSON, and hides where it came from.
void make_finite(Json* json) {
  if (json->is_number_float() && !std::isfinite(json->get<double>())) *json = nullptr;
  if (!json->is_structured()) return;
  for (Json& value : *json) make_finite(&value);
}

}  // namespace

PolicyFigures figures_of(const SimulatedScenario& scenario, size_t policy) {
  const SimRun& run = scenario.policies.at(policy).run;
  const double first = scenario.policies.front().run.tokens_per_s;
  PolicyFigures figures;
  if (first > 0 && run.tokens_per_s > 0) figures.relative = run.tokens_per_s / first;
  std::vector<int64_t> times;
  for (const SimIteration& one : run.series) {
    if (!one.died) times.push_back(one.iteration_ns);
    figures.most_mitigated_ranks = std::max(figures.most_mitigated_ranks, one.mitigated_ranks);
  }
  std::sort(times.begin(), times.end());
  figures.p50_ns = percentile(times, 50);
  figures.p99_ns = percentile(times, 99);
  figures.lost_hours = (run.restart_s + run.lost_s) / 3600;
  figures.cannot_run = run.short_by_bytes > 0 || (run.unable_iteration >= 0 && run.iterations == 0);
  if (figures.cannot_run) {
    const int64_t over = run.peak_bytes - scenario.scenario.budget_bytes;
    figures.missing_bytes =
        run.short_by_bytes > 0 ? run.short_by_bytes : std::max<int64_t>(0, over);
  }
  return figures;
}

std::string routing_text(const Scenario& scenario) {
  if (!scenario.trace.empty()) {
    const std::string name = "trace " + scenario.trace.filename().string();
    if (scenario.trace_left_out == 0) return name;
    return fmt::format("{} ({} records or lines of it left out: `bagualu trace` tells which)", name,
                       scenario.trace_left_out);
  }
  const std::string of =
      scenario.routing_file.empty() ? "" : " of " + scenario.routing_file.filename().string();
  return fmt::format("{}{} (seed {})", scenario.routing.kind, of, scenario.routing.seed);
}

std::string system_text(const SystemSpec& system) {
  return fmt::format("{} ({})", system.name, system.provenance);
}

Json to_json(const SimulateReport& report) {
  Json json;
  json["type"] = "simulation";
  json["version"] = kFormatVersion;
  json["bagualu"] = BAGUALU_VERSION;
  json["kind"] = "simulated";
  json["complete"] = report.complete;
  json["scenarios"] = Json::array();
  for (const SimulatedScenario& scenario : report.scenarios) {
    json["scenarios"].push_back(scenario_json(scenario));
  }
  make_finite(&json);
  return json;
}

}  // namespace bagualu
