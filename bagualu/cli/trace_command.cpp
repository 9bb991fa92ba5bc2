#include "bagualu/cli/trace_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>

#include "bagualu/base/atomic_file.h"
#include "bagualu/base/error.h"
#include "bagualu/cli/flags.h"
#include "bagualu/model/routing_log.h"
#include "bagualu/model/routing_source.h"

namespace bagualu {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWhere = "bagualu trace";

struct TraceFlags {
  std::vector<std::string> logs;
  std::string output;
  std::string json;
  std::string fit;
  std::string layers;
  std::string ep;
  std::string balanced_rows;
};

void add_flags(CLI::App* app, TraceFlags* flags) {
  app->add_option("LOG", flags->logs,
                  "routing logs: Megatron and BaGuaLu lines, CSV, JSON lines, run logs, any mix; "
                  "gzip too; - is standard input")
      ->type_name("FILE|-");
  app->add_option("-o,--output", flags->output, "write the trace as JSON lines here")
      ->type_name("FILE");
  app->add_option("--json", flags->json,
                  "write the statistics as JSON; with - instead of the table")
      ->type_name("FILE|-");
  app->add_option(
         "--fit", flags->fit,
         "write a routing shape for `bagualu simulate` here that makes iterations like the "
         "log's; counts per expert need --ep")
      ->type_name("FILE");
  app->add_option("--layers", flags->layers,
                  "layers of the model: names those without a line [not checked]")
      ->type_name("COUNT");
  app->add_option("--ep", flags->ep,
                  "ranks that share one copy of the experts: counts per expert become counts per "
                  "rank [each expert stands for itself]; of counts per rank it is checked")
      ->type_name("RANKS");
  app->add_option("--balanced-rows", flags->balanced_rows,
                  "rows of a rank and micro-batch if routing were even, tokens x top-k: needed if "
                  "the log has some ranks only [mean over the ranks of a layer]")
      ->type_name("ROWS");
}

/// The same file twice would be the same micro-batches twice.
void check_files(const TraceFlags& flags) {
  if (flags.logs.empty()) throw InvalidInput(kWhere, "LOG", "nothing", "a routing log, or -");
  std::vector<std::string> places;
  const auto add = [&](const std::string& name, const char* field) {
    std::error_code status;
    const fs::path whole = name == "-" ? fs::path(name) : fs::weakly_canonical(name, status);
    if (std::find(places.begin(), places.end(), whole.string()) != places.end()) {
      throw InvalidInput(kWhere, field, fmt::format("{} twice", name), "each file once");
    }
    places.push_back(whole.string());
  };
  for (const std::string& log : flags.logs) add(log, "LOG");
  if (flags.output == "-") {
    throw InvalidInput(kWhere, "--output", "-", "a file; --json - prints the statistics");
  }
  if (!flags.output.empty()) add(flags.output, "--output");
  if (!flags.json.empty() && flags.json != "-") add(flags.json, "--json");
  if (flags.fit == "-") {
    throw InvalidInput(kWhere, "--fit", "-", "a file; --json - prints the statistics");
  }
  if (!flags.fit.empty()) add(flags.fit, "--fit");
}

TraceRequest request_of(const TraceFlags& flags) {
  check_files(flags);
  TraceRequest request;
  request.logs = flags.logs;
  const auto integer = [](const std::string& text, const char* flag, int64_t max) {
    return text.empty() ? 0 : parse_int_flag(text, kWhere, flag, 1, max);
  };
  request.layers = integer(flags.layers, "--layers", 4096);
  request.ep = integer(flags.ep, "--ep", 1 << 20);
  request.balanced_rows = integer(flags.balanced_rows, "--balanced-rows", int64_t{1} << 36);
  return request;
}

RoutingTrace trace_of(const TraceRequest& request) {
  const std::vector<fs::path> paths(request.logs.begin(), request.logs.end());
  RoutingTrace trace = read_routing_logs(paths);
  if (request.layers > 0) {
    int32_t last = 0;
    for (const RoutedRecord& record : trace.records) last = std::max(last, record.layer);
    if (last >= trace.first_layer + request.layers) {
      throw InvalidInput(kWhere, "--layers", std::to_string(request.layers),
                         fmt::format("at least {}: the log has layer {}, counted from {}",
                                     last + 1 - trace.first_layer, last, trace.first_layer));
    }
  }
  return trace;
}

/// Throws: InvalidInput if the trace has experts (how uneven they are says nothing about ranks) or
///         no iteration with the rows of all ranks of a layer.
std::string fitted_json(const TraceRequest& request, const RoutingTrace& trace,
                        const RoutingStats& stats) {
  if (trace.per_expert) {
    throw InvalidInput(kWhere, "--ep", "nothing",
                       fmt::format("a divisor of {}: the log counts per expert, and --fit is about "
                                   "the ranks that hold them",
                                   expert_count(trace)));
  }
  if (request.balanced_rows > 0) {
    throw InvalidInput(kWhere, "--balanced-rows", std::to_string(request.balanced_rows),
                       "nothing with --fit, which needs a log of all ranks");
  }
  if (stats.steps == 0) {
    throw InvalidInput(kWhere, "--fit", "no iteration with rows of all ranks of a layer",
                       "a log of all ranks");
  }
  return to_json(fit_routing(trace)).dump(2) + "\n";
}

int answer(const TraceFlags& flags, const Streams& streams) {
  const TraceRequest request = request_of(flags);
  const RoutingTrace read = trace_of(request);
  const bool fold = read.per_expert && request.ep > 0;
  const RoutingTrace folded =
      fold ? fold_experts(read, request.ep, kWhere, "--ep") : RoutingTrace();
  const RoutingTrace& trace = fold ? folded : read;
  const RoutingStats stats = routing_stats(trace, {request.balanced_rows});
  if (!flags.fit.empty()) write_file_atomic(flags.fit, fitted_json(request, trace, stats));
  // The trace keeps its experts: only so can it be replayed.
  if (!flags.output.empty()) write_file_atomic(flags.output, to_json_lines(read));
  if (flags.json == "-") {
    streams.out << to_json(request, trace, stats).dump(2) << '\n';
    return kExitDone;
  }
  if (!flags.json.empty()) {
    write_file_atomic(flags.json, to_json(request, trace, stats).dump(2) + "\n");
  }
  print_table(request, trace, stats, streams.out);
  return kExitDone;
}

}  // namespace

std::vector<int32_t> absent_layers(const RoutingTrace& trace, const RoutingStats& stats,
                                   int64_t layers) {
  std::vector<int32_t> absent;
  for (int64_t layer = trace.first_layer; layer < trace.first_layer + layers; ++layer) {
    const bool found = std::any_of(stats.layers.begin(), stats.layers.end(),
                                   [&](const LayerImbalance& seen) { return seen.layer == layer; });
    if (!found) absent.push_back(static_cast<int32_t>(layer));
  }
  return absent;
}

int run_trace(const std::vector<std::string>& arguments, const Streams& streams) {
  CLI::App app(
      "Reads routing logs and tells how uneven routing was: the imbalance of an iteration is the "
      "largest over\nlayers of (hottest rank / mean), rows summed over its micro-batches. Defaults "
      "in [brackets].",
      kWhere);
  TraceFlags flags;
  add_flags(&app, &flags);
  if (!parse_flags(&app, arguments, kWhere, streams)) return kExitDone;
  return answer(flags, streams);
}

}  // namespace bagualu
