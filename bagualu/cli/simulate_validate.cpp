#include "bagualu/cli/simulate_validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "bagualu/base/atomic_file.h"
#include "bagualu/base/error.h"
#include "bagualu/base/json.h"
#include "bagualu/cli/flags.h"
#include "bagualu/sim/validate_run.h"

namespace bagualu {
namespace {

double ms(int64_t ns) { return static_cast<double>(ns) / 1e6; }

struct Compared {
  const char* key;
  const char* text;
  EqualCount StepValidation::*count;
};

constexpr std::array<Compared, 8> kCompared = {{
    {"residencies", "residencies of units", &StepValidation::residencies},
    {"plans", "plans", &StepValidation::plans},
    {"cache_hits", "decisions without a search", &StepValidation::cache_hits},
    {"peaks", "peaks of ranks and steps", &StepValidation::peaks},
    {"passes", "peaks and live bytes of passes", &StepValidation::passes},
    {"points", "live bytes after actions", &StepValidation::points},
    {"host_peaks", "peaks of host memory", &StepValidation::host_peaks},
    {"ends", "live bytes at the ends of steps", &StepValidation::ends},
}};

int64_t byte_differences(const StepValidation& step) {
  return step.peaks.different + step.passes.different + step.points.different +
         step.host_peaks.different + step.ends.different;
}

bool all_equal(const StepValidation& total) {
  for (const Compared& of : kCompared) {
    if ((total.*of.count).different > 0) return false;
  }
  return true;
}

Json counts_to_json(const StepValidation& step) {
  Json counts = Json::object();
  for (const Compared& of : kCompared) {
    const EqualCount& count = step.*of.count;
    counts[of.key] = {{"compared", count.compared}, {"different", count.different}};
    if (count.different > 0) counts[of.key]["first"] = count.first;
  }
  return counts;
}

std::string to_text(const RunValidation& all) {
  Json steps = Json::array();
  for (const StepValidation& step : all.steps) {
    Json one = {{"step", step.step},
                {"spike", step.spike},
                {"measured_ns", step.measured_ns},
                {"predicted_ns", step.predicted_ns > 0 ? Json(step.predicted_ns) : Json(nullptr)},
                {"measured_passes_ns", step.measured_passes_ns},
                {"predicted_passes_ns",
                 step.predicted_ns > 0 ? Json(step.predicted_passes_ns) : Json(nullptr)},
                {"calibrates", step.calibrates}};
    one.update(counts_to_json(step));
    steps.push_back(std::move(one));
  }
  const Json answer = {{"version", 1},
                       {"equal", all_equal(all.total)},
                       {"total", counts_to_json(all.total)},
                       {"timed_steps", all.timed_steps},
                       {"median_error_fraction", all.median_error},
                       {"p90_error_fraction", all.p90_error},
                       {"bias_fraction", all.bias},
                       {"median_passes_error_fraction", all.median_passes_error},
                       {"calibrated_decisions_ns", all.outside.decisions_ns},
                       {"calibrated_after_ns", all.outside.after_ns},
                       {"steps", steps}};
  return answer.dump() + "\n";
}

void print_table(const RunValidation& all, std::ostream& out) {
  out << "  step  spike   measured ms  simulated ms    error  units differ  bytes differ\n";
  for (const StepValidation& step : all.steps) {
    const bool timed = step.predicted_ns > 0;
    out << fmt::format("{:>6}  {:>5}  {:>12.3f}  {:>12}  {:>7}  {:>12}  {:>12}{}\n", step.step,
                       step.spike ? "yes" : "", ms(step.measured_ns),
                       timed ? fmt::format("{:.3f}", ms(step.predicted_ns)) : "-",
                       timed ? fmt::format("{:+.1f}%", 100 * step.error()) : "-",
                       step.residencies.different, byte_differences(step),
                       step.calibrates ? "  calibrates" : "");
  }
  out << "\n";
  for (const Compared& of : kCompared) {
    const EqualCount& count = all.total.*of.count;
    out << fmt::format("{:<32}  {:>10} compared  {:>8} different{}\n", of.text, count.compared,
                       count.different, count.different > 0 ? "; first: " + count.first : "");
  }
  if (all.timed_steps == 0) return;
  out << fmt::format(
      "\nstep time: {} steps, median error {:.1f}%, 90 of 100 within {:.1f}%, bias {:+.1f}%; "
      "passes alone {:.1f}%\n"
      "Simulated from the profile's operator times; from the steps marked: {:.3f} ms of decisions "
      "in a step,\n{:.3f} ms behind the last pass (gradients, optimizer, the loop). The first step "
      "of a start is not timed.\n",
      all.timed_steps, 100 * all.median_error, 100 * all.p90_error, 100 * all.bias,
      100 * all.median_passes_error, ms(all.outside.decisions_ns), ms(all.outside.after_ns));
}

}  // namespace

bool asks_for_validation(const std::vector<std::string>& arguments) {
  return std::any_of(arguments.begin(), arguments.end(), [](const std::string& argument) {
    return argument == "--validate" || argument.rfind("--validate=", 0) == 0;
  });
}

int run_simulate_validate(const std::vector<std::string>& arguments, const Streams& streams) {
  const std::string where = "bagualu simulate";
  CLI::App app("Decides a real run again and compares decisions, bytes and times.", where);
  std::string log, json;
  bool quiet = false;
  app.add_option("--validate", log, "run log of `bagualu train`")->type_name("LOG");
  app.add_option("--json", json, "one object in place of the table")->type_name("FILE|-");
  app.add_flag("--quiet", quiet, "no progress");
  // `--validate --help` would be a flag without its log.
  for (const char* help : {"--help", "-h"}) {
    if (std::find(arguments.begin(), arguments.end(), help) == arguments.end()) continue;
    streams.out << app.help();
    return kExitDone;
  }
  if (!parse_flags(&app, arguments, where, streams)) return kExitDone;
  if (log.empty()) throw InvalidInput(where, "--validate", "nothing", "a run log");
  const LoggedRun run = read_run_log(log);
  ValidateOptions options;
  int64_t shown = -1;
  if (!quiet) {
    options.progress = [&](int64_t done, int64_t steps) {
      const int64_t percent = 100 * done / steps;
      if (percent == std::exchange(shown, percent)) return;
      streams.err << fmt::format("\r{:>3}% of {} steps{}", percent, steps,
                                 done == steps ? "\n" : "")
                  << std::flush;
    };
  }
  const RunValidation all = validate_run(run, log, options);
  if (!json.empty() && json != "-") write_file_atomic(json, to_text(all));
  if (json == "-") {
    streams.out << to_text(all);
  } else {
    print_table(all, streams.out);
  }
  return all_equal(all.total) ? kExitDone : kExitFailed;
}

}  // namespace bagualu
