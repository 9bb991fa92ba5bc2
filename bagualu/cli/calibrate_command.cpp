#include "bagualu/cli/calibrate_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <utility>

#include "bagualu/base/atomic_file.h"
#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/cli/calibrate_figures.h"
#include "bagualu/cli/flags.h"
#include "bagualu/cli/plan_job_flags.h"
#include "bagualu/cli/simulate_scenarios.h"
#include "bagualu/cost/calibration.h"
#include "bagualu/schedule/job_time.h"
#include "bagualu/schedule/memory_snapshot.h"

namespace bagualu {
namespace {

constexpr const char* kWhere = "bagualu calibrate";
constexpr double kPerCent = 100;
constexpr double kNsPerMs = 1e6;

struct CalibrateFlags {
  std::string system;
  std::string measured;
  std::string fit;
  std::string out;
  std::string json;
  bool hold_out = false;
  std::string scenario;
  std::string mfu;
  std::string iterations;
  std::string snapshot;
  std::string row;
  CommonPlanFlags common;
  JobFlags job;
};

void add_flags(CLI::App* app, CalibrateFlags* flags) {
  const auto add = [&](const char* name, std::string* value, const char* type, const char* help) {
    app->add_option(name, *value, help)->type_name(type);
  };
  add("--system", &flags->system, "FILE|NAME",
      "machine to fit: a file or a name from configs/systems (needed)");
  add("--measured", &flags->measured, "FILE", "jobs with measured times (needed)");
  add("--fit", &flags->fit, "KEY,...",
      "keys of the system file to fit, at most one for three rows [gemm_efficiency_fraction, "
      "memory_efficiency_fraction, collective_efficiency_fraction, as many as rows allow]");
  add("--out", &flags->out, "FILE", "write the fitted system with the rows it came from");
  add("--json", &flags->json, "FILE|-",
      "write the comparison as JSON; with - instead of the table");
  app->add_flag("--hold-out", flags->hold_out,
                "fit on every second group of rows, by name, and test on the others");
  const auto of_figures = [&](const char* name, std::string* value, const char* type,
                              const char* help) {
    app->add_option(name, *value, help)->type_name(type)->group("Published figures");
  };
  of_figures("--scenario", &flags->scenario, "FILE|NAME",
             "in place of --measured: simulated on the machine, as `bagualu simulate` does");
  of_figures("--mfu", &flags->mfu, "POLICY=FRACTION,...",
             "published MFU of the policies' iterations without interruptions; as many as numbers "
             "in --fit [gemm_efficiency_fraction,collective_efficiency_fraction]");
  of_figures("--iterations", &flags->iterations, "COUNT", "of each simulation [8]");
  const auto of_memory = [&](const char* name, std::string* value, const char* type,
                             const char* help) {
    app->add_option(name, *value, help)->type_name(type)->group("Memory of a job");
  };
  of_memory("--snapshot", &flags->snapshot, "FILE",
            "memory_stats() or _snapshot() of torch.cuda as JSON, or bytes by rank and bucket; the "
            "job is a --row of --measured, or what the flags of `bagualu plan` say");
  of_memory("--row", &flags->row, "ID", "job of the snapshot, in --measured");
  of_memory("--model", &flags->common.model, "FILE|NAME", "as in `bagualu plan`, and those below");
  of_memory("--world-size", &flags->common.world_size, "RANKS", "ranks in all");
  of_memory("--micro-batch-size", &flags->common.micro_batch_size, "SEQUENCES", "per rank");
  of_memory("--seq", &flags->common.seq, "TOKENS", "per sequence");
  of_memory("--micro-batches", &flags->common.microbatches, "COUNT", "per step");
  of_memory("--imbalance", &flags->common.imbalance, "FACTOR", "routed load of every rank [1]");
  add_job_flags(app, &flags->job);
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size() && !text.empty();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::string summary_text(const char* what, const ErrorSummary& errors) {
  return errors.count == 0
             ? std::string()
             : fmt::format("; {} {:.2f} %, at most {:.2f} %", what, kPerCent * errors.mean_fraction,
                           kPerCent * errors.largest_fraction);
}

void print_side(const Calibration& result, bool fitted_on, std::ostream& out) {
  const ErrorSummary errors = result.summary(fitted_on);
  if (errors.count == 0) return;
  out << fmt::format("\n{}\n", fitted_on ? "fitted on" : "tested on");
  out << fmt::format("  {:<52} {:>14} {:>11} {:>11} {:>8} {:>8} {:>8}\n", "row", "", "measured",
                     "predicted", "error", "no fit", "peer");
  for (const TimeComparison& entry : result.comparisons) {
    if (entry.fitted_on != fitted_on) continue;
    const std::string peer =
        entry.peer_ns > 0
            ? fmt::format("{:.2f} %", kPerCent * (entry.peer_ns / entry.measured_ns - 1))
            : "";
    out << fmt::format("  {:<52} {:>14} {:>8.1f} ms {:>8.1f} ms {:>6.2f} % {:>6.2f} % {:>8}\n",
                       entry.row, entry.what, entry.measured_ns / kNsPerMs,
                       entry.predicted_ns / kNsPerMs, kPerCent * entry.error_fraction(),
                       kPerCent * entry.unfitted_error_fraction(), peer);
  }
  out << fmt::format("  {} times: mean error {:.2f} %, at most {:.2f} %{}{}\n", errors.count,
                     kPerCent * errors.mean_fraction, kPerCent * errors.largest_fraction,
                     summary_text("without the fit", result.unfitted_summary(fitted_on)),
                     summary_text("peer", result.peer_summary(fitted_on)));
}

void print_table(const MeasuredJobs& jobs, const Calibration& result, std::ostream& out) {
  out << fmt::format("measured  {}\n", jobs.source);
  for (const FittedNumber& number : result.numbers) {
    out << fmt::format("fitted    {} {:.6g}, was {:.6g}\n", number.key, number.after,
                       number.before);
  }
  print_side(result, true, out);
  print_side(result, false, out);
}

Json to_json(const Calibration& result) {
  Json json{{"format", "bagualu.calibration"}, {"version", 1}, {"system", result.system}};
  for (const TimeComparison& entry : result.comparisons) {
    Json row{{"row", entry.row},
             {"group", entry.group},
             {"what", entry.what},
             {"fitted_on", entry.fitted_on},
             {"measured_ns", entry.measured_ns},
             {"predicted_ns", entry.predicted_ns},
             {"unfitted_ns", entry.unfitted_ns}};
    if (entry.peer_ns > 0) row["peer_ns"] = entry.peer_ns;
    json["times"].push_back(std::move(row));
  }
  return json;
}

/// The job that a snapshot was taken of, and the routed load to predict it at.
std::pair<Job, RoutedLoads> job_of_snapshot(const CalibrateFlags& flags, const SourceTree& tree) {
  if (flags.row.empty()) {
    CommonPlanFlags common = flags.common;
    common.system = flags.system;
    if (common.imbalance.empty()) common.imbalance = "1";
    JobPlanRequest request = job_request(flags.job, common, tree);
    return {std::move(request.job), std::move(request.loads)};
  }
  if (flags.measured.empty()) throw InvalidInput(kWhere, "--measured", "nothing", "a file");
  std::string known;
  for (MeasuredJob& row : measured_jobs_from_file(flags.measured).rows) {
    if (row.id == flags.row) return {std::move(row.job), {}};
    known += (known.empty() ? "" : ", ") + row.id;
  }
  throw InvalidInput(kWhere, "--row", flags.row, known);
}

int answer_memory(const CalibrateFlags& flags, const SourceTree& tree, const Streams& streams) {
  const auto [job, loads] = job_of_snapshot(flags, tree);
  const std::vector<BucketComparison> rows =
      compare_memory(memory_snapshot_from_file(flags.snapshot), job, loads, flags.snapshot);
  Json json{{"format", "bagualu.memory_comparison"}, {"version", 1}, {"buckets", Json::array()}};
  std::string table = fmt::format("{:>6} {:>4}  {:<12} {:>12} {:>12} {:>9}\n", "rank", "pp",
                                  "bucket", "measured", "predicted", "error");
  for (const BucketComparison& row : rows) {
    table += fmt::format("{:>6} {:>4}  {:<12} {:>12} {:>12} {:>7.2f} %\n", row.rank, row.pp_rank,
                         row.bucket, format_bytes(row.measured_bytes),
                         format_bytes(row.predicted_bytes), kPerCent * row.error_fraction());
    json["buckets"].push_back({{"rank", row.rank},
                               {"pp_rank", row.pp_rank},
                               {"bucket", row.bucket},
                               {"measured_bytes", row.measured_bytes},
                               {"predicted_bytes", row.predicted_bytes}});
  }
  if (!flags.json.empty() && flags.json != "-") {
    write_file_atomic(flags.json, json.dump(2) + "\n");
  }
  streams.out << (flags.json == "-" ? json.dump(2) + "\n" : table);
  return kExitDone;
}

int answer_figures(const CalibrateFlags& flags, const SourceTree& tree, const Streams& streams) {
  constexpr int64_t kIterations = 8;
  if (flags.system.empty()) throw InvalidInput(kWhere, "--system", "nothing", "a file or a name");
  if (flags.mfu.empty()) {
    throw InvalidInput(kWhere, "--mfu", "nothing", "POLICY=FRACTION,..., as static=0.3");
  }
  const std::filesystem::path path =
      resolve_config(flags.system, config_folders(tree, "systems"), kWhere, "--system");
  FigureRequest request;
  request.system = read_json_file(path);
  request.where = path.string();
  const std::vector<std::filesystem::path> folders = config_folders(tree, "scenarios");
  request.scenario = scenario_from_file(
      resolve_config(flags.scenario, folders, kWhere, "--scenario"), config_roots(folders));
  request.figures = parse_figures(flags.mfu, kWhere);
  request.keys = split(flags.fit.empty() ? "gemm_efficiency_fraction,collective_efficiency_fraction"
                                         : flags.fit);
  request.iterations = flags.iterations.empty()
                           ? kIterations
                           : parse_int_flag(flags.iterations, kWhere, "--iterations", 1);
  const FigureFit fit = fit_scenario_figures(request, simulate_job);
  // A machine that does not give the figures is no fitted one.
  if (fit.solved && !flags.out.empty()) write_file_atomic(flags.out, fit.system.dump(2) + "\n");
  const int code = fit.solved ? kExitDone : kExitInfeasible;
  const Json json = figures_json(request, fit);
  if (flags.json == "-") {
    streams.out << json.dump(2) << '\n';
    return code;
  }
  if (!flags.json.empty()) write_file_atomic(flags.json, json.dump(2) + "\n");
  print_figures(request, fit, streams.out);
  return code;
}

int answer(const CalibrateFlags& flags, const SourceTree& tree, const Streams& streams) {
  const auto needed = [](const std::string& value, const char* flag, const char* what) {
    if (value.empty()) throw InvalidInput(kWhere, flag, "nothing", what);
  };
  needed(flags.system, "--system", "a file or a name");
  needed(flags.measured, "--measured", "a file");
  const std::filesystem::path path =
      resolve_config(flags.system, config_folders(tree, "systems"), kWhere, "--system");
  const MeasuredJobs jobs = measured_jobs_from_file(flags.measured);
  const IterationPredictor predictor = [](const Job& job, const SystemSpec& system) {
    return static_cast<double>(job_time(job, system, {}).iteration_ns);
  };
  const CalibrationOptions options{.numbers = split(flags.fit), .hold_out = flags.hold_out};
  const Calibration result =
      calibrate(read_json_file(path), path.string(), jobs, predictor, options);
  if (!flags.out.empty()) write_file_atomic(flags.out, result.system.dump(2) + "\n");
  if (flags.json == "-") {
    streams.out << to_json(result).dump(2) << '\n';
    return kExitDone;
  }
  if (!flags.json.empty()) write_file_atomic(flags.json, to_json(result).dump(2) + "\n");
  print_table(jobs, result, streams.out);
  return kExitDone;
}

}  // namespace

int run_calibrate(const std::vector<std::string>& arguments, const SourceTree& tree,
                  const Streams& streams) {
  CLI::App app(
      "Fits the efficiencies of a machine to jobs whose times were measured, with errors with and "
      "without the fit;\nor, with --scenario, to published MFUs of policies on a simulated job; "
      "or, "
      "with --snapshot, compares a\njob's memory with the prediction, bucket by bucket.",
      kWhere);
  CalibrateFlags flags;
  add_flags(&app, &flags);
  if (!parse_flags(&app, arguments, kWhere, streams)) return kExitDone;
  if (!flags.scenario.empty()) return answer_figures(flags, tree, streams);
  return flags.snapshot.empty() ? answer(flags, tree, streams)
                                : answer_memory(flags, tree, streams);
}

}  // namespace bagualu
