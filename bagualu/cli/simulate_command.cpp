#include "bagualu/cli/simulate_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <iostream>

#include "bagualu/base/atomic_file.h"
#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/cli/flags.h"
#include "bagualu/cli/interrupt.h"
#include "bagualu/cli/progress_line.h"
#include "bagualu/cli/simulate_page.h"
#include "bagualu/cli/simulate_scenarios.h"

namespace bagualu {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWhere = "bagualu simulate";
constexpr int64_t kMaxIterations = 100'000'000;
constexpr int64_t kMaxThreads = 1024;
constexpr int kExitSignal = 128;  // plus its number, as shells have it

/// The flags as they were typed; texts, so that every complaint has the same form.
struct SimulateFlags {
  std::string scenario;
  std::string policies;
  std::string iterations;
  std::string routing;
  std::string seed;
  std::string threads = "1";
  std::string json;
  std::string html;
  std::string perfetto;
  std::string perfetto_ranks;
  std::string trace_iteration;
  bool quiet = false;
  bool list = false;
};

void add_flags(CLI::App* app, SimulateFlags* flags) {
  const auto add = [&](const char* name, std::string* value, const char* type, const char* help) {
    const std::string shown = value->empty() ? "" : fmt::format(" [{}]", *value);
    return app->add_option(name, *value, help + shown)->type_name(type);
  };
  add("--scenario", &flags->scenario, "FILE|NAME,...",
      "what is trained, where, with which routing: files or names from configs/scenarios (needed); "
      "several are compared by scale");
  add("--policy", &flags->policies, "NAME,...",
      "policies, in this order: a label or policy of the scenario; any other policy with the "
      "settings its own paper would choose; ablation (full recompute, + per operator, + dynamic, "
      "+ overlap) [those of the scenario]");
  add("--iterations", &flags->iterations, "COUNT", "optimizer steps that count [the scenario's]");
  add("--routing", &flags->routing, "TRACE|KIND|FILE",
      "in place of the scenario's: a recorded trace, a kind (paper, balanced, hot-rank, ...), or a "
      "JSON file with a kind and its settings [the scenario's]");
  add("--seed", &flags->seed, "NUMBER", "of routing and failures [the scenario's]");
  add("--threads", &flags->threads, "COUNT", "of this machine; figures do not depend on it");
  add("--json", &flags->json, "FILE|-", "write the answer as JSON; with - instead of the table");
  add("--html", &flags->html, "FILE",
      "write a page: throughput, MFU, imbalance, memory over a step, what a spike does");
  add("--perfetto", &flags->perfetto, "FILE",
      "write a Chrome trace of one iteration under every policy, for ui.perfetto.dev");
  add("--perfetto-ranks", &flags->perfetto_ranks, "RANK,...",
      "ranks of the Chrome trace, numbered as Megatron does [the hottest, and of every pipeline "
      "stage the heaviest]");
  add("--trace-iteration", &flags->trace_iteration, "NUMBER",
      "iteration of the Chrome trace, from 0 [the most uneven of each policy's run]");
  app->add_flag("--quiet", flags->quiet, "no progress");
  app->add_flag("--list", flags->list, "list the scenarios of configs/scenarios and end");
}

/// Found out before the simulation and not behind it, when other files are written already. The
/// same file twice would be written over.
void check_files(const SimulateFlags& flags) {
  std::vector<std::pair<const char*, std::string>> files = {
      {"--json", flags.json}, {"--html", flags.html}, {"--perfetto", flags.perfetto}};
  std::vector<std::string> places;
  for (const auto& [flag, name] : files) {
    if (name.empty()) continue;
    if (name == "-") {
      if (std::string_view(flag) == "--json") continue;
      throw InvalidInput(kWhere, flag, "-", "a file; --json - prints the figures");
    }
    std::error_code status;
    const std::string whole = fs::weakly_canonical(name, status).string();
    if (std::find(places.begin(), places.end(), whole) != places.end()) {
      throw InvalidInput(kWhere, flag, fmt::format("{} twice", name), "each file once");
    }
    const fs::path folder = fs::path(name).parent_path();
    if (!folder.empty() && !fs::is_directory(folder, status)) {
      throw InvalidInput(kWhere, flag, fmt::format("\"{}\"", name),
                         "a file in a folder that exists");
    }
    check_writable(name);
    places.push_back(whole);
  }
  if (!flags.perfetto_ranks.empty() && flags.perfetto.empty()) {
    throw InvalidInput(kWhere, "--perfetto-ranks", "no --perfetto", "both");
  }
  if (!flags.trace_iteration.empty() && flags.perfetto.empty()) {
    throw InvalidInput(kWhere, "--trace-iteration", "no --perfetto", "both");
  }
}

std::vector<int64_t> ranks_of(const SimulateFlags& flags, const std::vector<Scenario>& scenarios) {
  std::vector<int64_t> ranks;
  if (flags.perfetto_ranks.empty()) return ranks;
  int64_t devices = kMaxIterations;
  for (const Scenario& scenario : scenarios) {
    devices = std::min(devices, scenario.job.layout.world_size);
  }
  for (const std::string& text : split_list(flags.perfetto_ranks)) {
    const int64_t rank = parse_int_flag(text, kWhere, "--perfetto-ranks", 0, devices - 1);
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) {
      throw InvalidInput(kWhere, "--perfetto-ranks", fmt::format("{} twice", rank),
                         "each rank once");
    }
    ranks.push_back(rank);
  }
  return ranks;
}

SimulateRequest request_of(const SimulateFlags& flags, const SourceTree& tree,
                           const Streams& streams) {
  check_files(flags);
  SimulateRequest request;
  ScenarioChoice choice;
  choice.scenarios = flags.scenario;
  choice.policies = flags.policies;
  choice.routing = flags.routing;
  if (!flags.seed.empty()) {
    choice.seed =
        parse_int_flag(flags.seed, kWhere, "--seed", 0, std::numeric_limits<int64_t>::max());
  }
  if (!flags.iterations.empty()) {
    request.options.iterations =
        parse_int_flag(flags.iterations, kWhere, "--iterations", 1, kMaxIterations);
  }
  request.options.threads =
      static_cast<int>(parse_int_flag(flags.threads, kWhere, "--threads", 1, kMaxThreads));
  if (!flags.trace_iteration.empty()) {
    request.trace_iteration =
        parse_int_flag(flags.trace_iteration, kWhere, "--trace-iteration", 0, kMaxIterations);
  }
  request.scenarios = chosen_scenarios(choice, config_folders(tree, "scenarios"), kWhere);
  for (const Scenario& scenario : request.scenarios) {
    const int64_t iterations = request.iterations_of(scenario);
    if (request.trace_iteration >= iterations) {
      throw InvalidInput(kWhere, "--trace-iteration", std::to_string(request.trace_iteration),
                         fmt::format("0 to {}, those of {}", iterations - 1, scenario.name));
    }
  }
  request.perfetto_ranks = ranks_of(flags, request.scenarios);
  request.wants_page = !flags.html.empty();
  request.wants_perfetto = !flags.perfetto.empty();
  request.live = !flags.quiet && is_terminal(streams.err);
  return request;
}

void write_files(const SimulateFlags& flags, const SimulateAnswer& answer) {
  if (!flags.json.empty() && flags.json != "-") {
    write_file_atomic(flags.json, to_json(answer.report).dump(2) + "\n");
  }
  if (!flags.html.empty()) write_file_atomic(flags.html, simulate_page(answer.report));
  if (!flags.perfetto.empty()) write_file_atomic(flags.perfetto, answer.perfetto);
}

/// One line per policy that cannot run at all.
int verdict(const SimulateReport& report, const Streams& streams) {
  int code = kExitDone;
  for (const SimulatedScenario& scenario : report.scenarios) {
    for (size_t i = 0; i < scenario.policies.size(); ++i) {
      const PolicyFigures figures = figures_of(scenario, i);
      if (!figures.cannot_run) continue;
      const SimRun& run = scenario.policies[i].run;
      streams.err << fmt::format(
          "{}: infeasible: {} cannot run {} under a budget of {}: {} {} ({} bytes)\n", kWhere,
          run.policy.label, scenario.scenario.name, format_bytes(scenario.scenario.budget_bytes),
          run.short_by_bytes > 0 ? "under its floor by" : "out of memory in every try, by",
          format_bytes(figures.missing_bytes), figures.missing_bytes);
      code = kExitInfeasible;
    }
  }
  return code;
}

int answer(const SimulateFlags& flags, const SourceTree& tree, const Simulator& simulator,
           const Streams& streams) {
  if (flags.list) {
    print_scenarios(config_folders(tree, "scenarios"), streams.out);
    return kExitDone;
  }
  const SimulateRequest request = request_of(flags, tree, streams);
  const InterruptGuard guard;
  const SimulateAnswer found = simulate(request, simulator, streams.err);
  write_files(flags, found);
  if (flags.json == "-") {
    streams.out << to_json(found.report).dump(2) << '\n';
  } else {
    print_table(found.report, streams.out);
  }
  const int code = verdict(found.report, streams);
  return found.report.complete ? code : kExitSignal + InterruptGuard::signal();
}

}  // namespace

int run_simulate(const std::vector<std::string>& arguments, const SourceTree& tree,
                 const Simulator& simulator, const Streams& streams) {
  CLI::App app(
      "Simulates a training job on a cluster, operator by operator, under several policies: "
      "throughput, MFU,\nmemory, what running out of memory costs. Nothing is measured: times come "
      "from the scenario's machine\ndescription. Ctrl-C stops and tells what is done so far. "
      "Defaults in [brackets].\nWith --validate LOG it replays a real run instead: see "
      "`bagualu simulate --validate --help`.",
      kWhere);
  SimulateFlags flags;
  add_flags(&app, &flags);
  if (!parse_flags(&app, arguments, kWhere, streams)) return kExitDone;
  return answer(flags, tree, simulator, streams);
}

}  // namespace bagualu
