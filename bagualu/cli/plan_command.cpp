#include "bagualu/cli/plan_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <string_view>

#include "bagualu/base/atomic_file.h"
#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/cli/flags.h"
#include "bagualu/cli/plan_job.h"
#include "bagualu/cli/plan_job_flags.h"
#include "bagualu/cli/plan_job_page.h"
#include "bagualu/cli/plan_report.h"
#include "bagualu/model/megatron_flags.h"
#include "bagualu/provision/policy.h"

namespace bagualu {
namespace {

constexpr const char* kWhere = "bagualu plan";
constexpr int64_t kMaxRanks = 1 << 20;

/// The flags as they were typed; texts, so that every complaint has the same form.
struct PlanFlags {
  std::string model;
  std::string ep = "1";
  std::string world_size;
  std::string micro_batch_size = "1";
  std::string seq = "256";
  std::string microbatches = "4";
  std::string dtype = "fp32";
  std::string budget;
  std::string host_budget;
  std::string imbalance = "1.2";
  std::string chunk_rows = "256";
  std::string threads = "1";
  std::string policies;
  std::string system = "cpu-2core";
  std::string json;
  std::string explain;
  bool has_explain = false;
  JobFlags job;
};

void add_flags(CLI::App* app, PlanFlags* flags) {
  const auto add = [&](const char* name, std::string* value, const char* type, const char* help) {
    const std::string shown = value->empty() ? "" : fmt::format(" [{}]", *value);
    return app->add_option(name, *value, help + shown)->type_name(type);
  };
  add("--model", &flags->model, "FILE|NAME",
      "model: native JSON, Hugging Face config.json, or a name from configs/models (needed)");
  add("--ep", &flags->ep, "RANKS", "ranks that share one copy of the experts");
  add("--world-size", &flags->world_size, "RANKS", "ranks in all [as --ep]");
  add("--micro-batch-size", &flags->micro_batch_size, "SEQUENCES",
      "per micro-batch and rank (a job: 1)");
  add("--seq", &flags->seq, "TOKENS", "per sequence (a job: 4096)");
  add("--micro-batches", &flags->microbatches, "COUNT", "per optimizer step (a job: 1)");
  add("--dtype", &flags->dtype, "fp32|bf16", "of activations; master weights are fp32");
  add("--budget", &flags->budget, "SIZE",
      "device memory of a rank, as 96MiB [none: policies are not tried]");
  add("--host-budget", &flags->host_budget, "SIZE", "host memory of a rank for offload [no limit]");
  add("--imbalance", &flags->imbalance, "FACTOR",
      "load to look at: rows of the hottest rank over the mean, in every MoE layer");
  add("--chunk-rows", &flags->chunk_rows, "ROWS", "most rows of one expert computed at once");
  add("--threads", &flags->threads, "COUNT", "compute threads of a rank");
  add("--policy", &flags->policies, "NAME,...",
      "policies to try [all]: save-all, full-recompute, selective (core_attn), static (fitted to "
      "1.2x), threshold, adapipe, kwai, retry, adaptive");
  add("--system", &flags->system, "FILE|NAME",
      "machine whose rates price the choices: a file or a name from configs/systems (a job: h100)");
  add("--json", &flags->json, "FILE|-", "write the answer as JSON; with - instead of the table");
  app->add_option(
         "--explain", flags->explain,
         "show which combinations of residencies were looked at and which are redundant; of "
         "a job: every tensor whose name holds TENSOR, with its formula")
      ->type_name("[TENSOR]")
      ->expected(0, 1);
  add_job_flags(app, &flags->job);
}

PlanRequest request_of(const PlanFlags& flags, const SourceTree& tree) {
  PlanRequest request;
  if (flags.model.empty()) throw InvalidInput(kWhere, "--model", "nothing", "a file or a name");
  const auto integer = [](const std::string& text, const char* flag, int64_t max = INT32_MAX) {
    return parse_int_flag(text, kWhere, flag, 1, max);
  };
  request.layout.ep_size = integer(flags.ep, "--ep", kMaxRanks);
  request.layout.world_size = flags.world_size.empty()
                                  ? request.layout.ep_size
                                  : integer(flags.world_size, "--world-size", kMaxRanks);
  request.shape.micro_batch_size = integer(flags.micro_batch_size, "--micro-batch-size");
  request.shape.seq = integer(flags.seq, "--seq");
  request.shape.microbatches = integer(flags.microbatches, "--micro-batches");
  request.shape.dtype = parse_dtype(flags.dtype, kWhere, "--dtype");
  request.threads = integer(flags.threads, "--threads", 4096);
  request.chunk_rows = integer(flags.chunk_rows, "--chunk-rows");
  request.imbalance = parse_number_flag(flags.imbalance, kWhere, "--imbalance", 1.0, 1e6);
  if (!flags.budget.empty()) request.budget_bytes = parse_bytes(flags.budget, kWhere, "--budget");
  if (!flags.host_budget.empty()) {
    request.host_budget_bytes = parse_bytes(flags.host_budget, kWhere, "--host-budget");
  }
  request.policies = flags.policies.empty()
                         ? policy_names()
                         : parse_names_flag(flags.policies, kWhere, "--policy", policy_names());
  if (!flags.explain.empty()) {
    throw InvalidInput(kWhere, "--explain", flags.explain, "nothing behind it without --layout");
  }
  request.explain = flags.has_explain;
  request.model = model_from_file(
      resolve_config(flags.model, config_folders(tree, "models"), kWhere, "--model"));
  validate(request.model, request.shape, request.layout, kWhere);
  request.system =
      system_from_file(resolve_system(flags.system, tree, home_folder(), kWhere, "--system"));
  return request;
}

int answer(const PlanFlags& flags, const SourceTree& tree, const Streams& streams) {
  const PlanRequest request = request_of(flags, tree);
  const PlanReport report = make_plan_report(request);
  if (flags.json == "-") {
    streams.out << to_json(request, report).dump(2) << '\n';
  } else {
    if (!flags.json.empty()) {
      write_file_atomic(flags.json, to_json(request, report).dump(2) + "\n");
    }
    print_table(request, report, streams.out);
  }
  const auto refuse = [&](const char* kind, int64_t budget, int64_t missing, int64_t floor) {
    streams.err << fmt::format(
        "{}: infeasible: the {} of {} is {} ({} bytes) under the floor of {}, at {}\n", kWhere,
        kind, format_bytes(budget), format_bytes(missing), missing, format_bytes(floor),
        report.floor.at);
    return kExitInfeasible;
  };
  if (report.short_by_bytes > 0) {
    return refuse("budget", request.budget_bytes, report.short_by_bytes, report.floor.bytes);
  }
  if (report.host_short_by_bytes > 0) {
    return refuse("host budget", request.host_budget_bytes, report.host_short_by_bytes,
                  report.floor_host_bytes);
  }
  return kExitDone;
}

/// Flags of one rank of `bagualu train` mean nothing to a job, and the reverse.
void refuse_mixed(const CLI::App& app, bool job) {
  const std::vector<const char*> of_rank = {"--ep",         "--dtype",   "--host-budget",
                                            "--chunk-rows", "--threads", "--policy"};
  const std::vector<const char*> of_job = {
      "--stages", "--pipeline", "--global-batch", "--recompute", "--offload", "--vocab",
      "--spike",  "--routing",  "--cold-router",  "--emit",      "--report"};
  for (const char* flag : job ? of_rank : of_job) {
    if (app.count(flag) == 0) continue;
    throw InvalidInput(kWhere, flag, "given",
                       job ? "no such flag for a job (--layout, --megatron-args, --strategy)"
                           : "--layout, --megatron-args, --strategy or --search beside it");
  }
}

/// One answer of a job at a time: flags and tensors stand alone.
void refuse_two_answers(const CLI::App& app) {
  for (const char* first : {"--emit", "--explain"}) {
    for (const char* other : {"--explain", "--json", "--report", "--search"}) {
      if (app.count(first) == 0 || app.count(other) == 0 || first == std::string_view(other)) {
        continue;
      }
      throw InvalidInput(kWhere, first, std::string(other) + " beside it", "one of the two");
    }
  }
}

/// Where the answer goes; prints the table or JSON and returns the exit code.
int answer_job(const CLI::App& app, const PlanFlags& flags, const SourceTree& tree,
               const Streams& streams) {
  const auto given = [&](const char* flag, const std::string& value) {
    return app.count(flag) > 0 ? value : std::string();
  };
  const CommonPlanFlags common = {
      .model = flags.model,
      .world_size = flags.world_size,
      .micro_batch_size = given("--micro-batch-size", flags.micro_batch_size),
      .seq = given("--seq", flags.seq),
      .microbatches = given("--micro-batches", flags.microbatches),
      .budget = flags.budget,
      .imbalance = given("--imbalance", flags.imbalance),
      .system = given("--system", flags.system)};
  const JobPlanRequest request = job_request(flags.job, common, tree);
  if (flags.has_explain) {
    explain_tensor(request.job, flags.explain, streams.out);
    return kExitDone;
  }
  if (!flags.job.emit.empty()) {
    streams.out << megatron_flags_text(request.job);
    return kExitDone;
  }
  const JobPlanReport report = make_job_report(request);
  if (!flags.job.report.empty()) {
    write_file_atomic(flags.job.report, job_page(request, report));
  }
  if (flags.json == "-") {
    streams.out << to_json(request, report).dump(2) << '\n';
  } else {
    if (!flags.json.empty()) {
      write_file_atomic(flags.json, to_json(request, report).dump(2) + "\n");
    }
    print_table(request, report, streams.out);
  }
  const bool nothing_fits = report.search && report.search->fitting == 0;
  if (report.short_by_bytes == 0 && !nothing_fits) return kExitDone;
  if (report.search && !nothing_fits) return kExitDone;  // the asked one does not fit, others do
  const int64_t missing = report.search ? report.search->short_by_bytes : report.short_by_bytes;
  streams.err << fmt::format(
      "{}: infeasible: {} over the budget of {} by {} ({} bytes)\n", kWhere,
      report.search ? "every configuration is" : fmt::format("rank {} is", report.heaviest),
      format_bytes(request.budget_bytes), format_bytes(missing), missing);
  return kExitInfeasible;
}

}  // namespace

int run_plan(const std::vector<std::string>& arguments, const SourceTree& tree,
             const Streams& streams) {
  CLI::App app(
      "Memory of one rank: static bytes, activations per layer, peak and its cause, the "
      "floor under which no\nrouting is safe, and the largest imbalance that each policy "
      "survives. With --layout, --megatron-args, --strategy or --search: every pipeline rank of a "
      "job\nthat Megatron trains, its time, and the cheapest way to survive more.\nSizes: KiB, "
      "MiB, GiB = 2^10, 2^20, 2^30 bytes. Defaults in [brackets].",
      kWhere);
  PlanFlags flags;
  add_flags(&app, &flags);
  if (!parse_flags(&app, arguments, kWhere, streams)) return kExitDone;
  flags.has_explain = app.count("--explain") > 0;
  const bool job = is_job(flags.job);
  refuse_mixed(app, job);
  if (job) refuse_two_answers(app);
  return job ? answer_job(app, flags, tree, streams) : answer(flags, tree, streams);
}

}  // namespace bagualu
