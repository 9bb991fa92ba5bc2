#include "bagualu/cli/plan_job_flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/cli/flags.h"
#include "bagualu/model/hf_config.h"
#include "bagualu/model/megatron_args.h"
#include "bagualu/model/routing_loads.h"
#include "bagualu/model/routing_log.h"
#include "bagualu/model/strategy.h"
#include "bagualu/provision/job_survival.h"

namespace bagualu {
namespace {

constexpr const char* kWhere = "bagualu plan";
constexpr int64_t kMaxRanks = 1 << 20;

void refuse(bool wrong, const char* flag, const std::string& found, const std::string& allowed) {
  if (wrong) throw InvalidInput(kWhere, flag, found, allowed);
}

std::vector<std::string> split(std::string_view text, char at, const char* flag) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(at, begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    refuse(parts.back().empty(), flag, std::string(text), "names without empty parts");
    begin = end + 1;
  }
  return parts;
}

/// "none", "full", "full:block:2", "full:uniform:2", or modules as "moe_act,layernorm".
RecomputeSettings parse_recompute(const std::string& text) {
  RecomputeSettings settings;
  if (text == "none") return settings;
  if (text.rfind("full", 0) != 0) {
    settings.granularity = RecomputeGranularity::kSelective;
    settings.modules = split(text, ',', "--recompute");
    std::sort(settings.modules.begin(), settings.modules.end());
    return settings;
  }
  const std::vector<std::string> parts = split(text, ':', "--recompute");
  const bool known = parts[0] == "full" && parts.size() != 2 && parts.size() <= 3 &&
                     (parts.size() == 1 || parts[1] == "block" || parts[1] == "uniform");
  refuse(!known, "--recompute", text, "none, full, full:uniform:N, full:block:N or module names");
  settings.granularity = RecomputeGranularity::kFull;
  if (parts.size() == 3) {
    settings.block = parts[1] == "block";
    settings.layers = parse_int_flag(parts[2], kWhere, "--recompute", 1, 4096);
  }
  return settings;
}

/// "expert_fc1,moe_act" or "expert_fc1,moe_act@0.5".
OffloadSettings parse_offload(const std::string& text) {
  OffloadSettings settings;
  const size_t at = text.find('@');
  if (at != std::string::npos) {
    settings.fraction =
        parse_number_flag(text.substr(at + 1), kWhere, "--offload (after @)", 0.0, 1.0);
  }
  settings.modules = split(std::string_view(text).substr(0, at), ',', "--offload");
  return settings;
}

/// "3=2.6" or "3=2.6,7=2": micro-batch and factor.
std::vector<std::pair<int64_t, double>> parse_spikes(const std::string& text,
                                                     int64_t microbatches) {
  std::vector<std::pair<int64_t, double>> spikes;
  for (const std::string& part : split(text, ',', "--spike")) {
    const size_t equals = part.find('=');
    refuse(equals == std::string::npos, "--spike", part, "MICROBATCH=FACTOR, as 3=2.6");
    spikes.emplace_back(
        parse_int_flag(part.substr(0, equals), kWhere, "--spike", 0, microbatches - 1),
        parse_number_flag(part.substr(equals + 1), kWhere, "--spike", 0.0, 1e6));
    for (size_t i = 0; i + 1 < spikes.size(); ++i) {
      refuse(spikes[i].first == spikes.back().first, "--spike",
             fmt::format("micro-batch {} twice", spikes[i].first), "each micro-batch once");
    }
  }
  return spikes;
}

/// Says what of a file stays unread, and takes the rest.
Job job_from_megatron(const JobFlags& flags, const CommonPlanFlags& common,
                      JobPlanRequest* request) {
  MegatronOptions options;
  if (!common.world_size.empty()) {
    options.world_size = parse_int_flag(common.world_size, kWhere, "--world-size", 1, kMaxRanks);
  }
  if (!flags.vocab.empty()) {
    options.vocab = parse_int_flag(flags.vocab, kWhere, "--vocab", 2, 1 << 24);
  }
  MegatronJob read = read_megatron_args(flags.megatron_args, options);
  request->ignored = std::move(read.ignored);
  request->unmodelled = std::move(read.unmodelled);
  if (read.job.model.name.empty()) {
    read.job.model.name = std::filesystem::path(flags.megatron_args).stem().string();
  }
  return std::move(read.job);
}

/// Layout and what belongs to it; everything else keeps what the file or the default said.
void set_layout(const JobFlags& flags, const CommonPlanFlags& common, Job* job) {
  if (!flags.layout.empty()) {
    job->layout = parse_layout(flags.layout, kWhere, "--layout");
    refuse(flags.layout.find("etp=") == std::string::npos && job->model.has_moe() &&
               job->layout.etp != 1,
           "--layout", flags.layout, "etp given");
  }
  if (!common.world_size.empty()) {
    const int64_t world = parse_int_flag(common.world_size, kWhere, "--world-size", 1, kMaxRanks);
    const int64_t model_ranks = job->layout.tp * job->layout.cp * job->layout.pp;
    refuse(flags.layout.find("dp=") != std::string::npos && world != job->layout.world_size,
           "--world-size", common.world_size,
           fmt::format("{}, the product of --layout", job->layout.world_size));
    refuse(world % model_ranks != 0, "--world-size", common.world_size,
           fmt::format("a multiple of tp * cp * pp = {}", model_ranks));
    job->layout.world_size = world;
  }
  if (!flags.pipeline.empty()) {
    job->pipeline = parse_pipeline_kind(flags.pipeline, kWhere, "--pipeline");
  } else if (job->layout.vpp > 1 && job->pipeline == PipelineKind::k1F1B) {
    job->pipeline = PipelineKind::kInterleaved;
  }
  const int64_t per_rank = virtual_stages_per_rank(job->pipeline, job->layout.vpp);
  if (!flags.stages.empty()) {
    job->stages =
        parse_stages(flags.stages, job->model, job->layout.pp * per_rank, kWhere, "--stages");
  } else if (job->stages.empty() || !flags.layout.empty() || !flags.pipeline.empty()) {
    job->stages = default_stages(job->model, job->layout.pp, per_rank);
  }
}

void set_batch(const JobFlags& flags, const CommonPlanFlags& common, Job* job) {
  const auto integer = [](const std::string& text, const char* flag) {
    return parse_int_flag(text, kWhere, flag, 1);
  };
  if (!common.seq.empty()) job->seq = integer(common.seq, "--seq");
  if (!common.micro_batch_size.empty()) {
    job->micro_batch_size = integer(common.micro_batch_size, "--micro-batch-size");
  }
  refuse(!flags.global_batch.empty() && !common.microbatches.empty(), "--global-batch",
         flags.global_batch, "one of --global-batch and --micro-batches");
  if (!common.microbatches.empty()) {
    job->microbatches = integer(common.microbatches, "--micro-batches");
  }
  if (flags.global_batch.empty()) return;
  const int64_t batch = integer(flags.global_batch, "--global-batch");
  const int64_t at_once = job->micro_batch_size * job->layout.dp();
  refuse(batch % at_once != 0, "--global-batch", flags.global_batch,
         fmt::format("a multiple of micro-batch size * dp = {}", at_once));
  job->microbatches = batch / at_once;
}

/// A load that no routing of this job can cause would answer a question that nobody has. A search
/// looks at other layouts, each with a limit of its own.
void refuse_impossible(const JobPlanRequest& request, const std::string& factor) {
  const double worst = worst_imbalance(request.job);
  const std::string allowed =
      request.job.model.has_moe()
          ? fmt::format("at most {:.6g}, the largest imbalance there can be in this job", worst)
          : "at most 1: this model has no experts";
  refuse(!factor.empty() && request.loads.factor > worst, "--imbalance", factor, allowed);
  for (const auto& [microbatch, spike] : request.loads.spikes) {
    refuse(spike > worst, "--spike", fmt::format("{}={:.6g}", microbatch, spike), allowed);
  }
}

/// Recorded loads by iteration; the factor that is asked for stays the one of --imbalance.
void set_loads(const JobFlags& flags, const CommonPlanFlags& common, JobPlanRequest* request) {
  const std::string& factor = common.imbalance;
  request->loads.factor =
      factor.empty() ? 1.2 : parse_number_flag(factor, kWhere, "--imbalance", 0.0, 1e6);
  if (!flags.spike.empty()) {
    request->loads.spikes = parse_spikes(flags.spike, request->job.microbatches);
  }
  if (!flags.search) refuse_impossible(*request, factor);
  const char* forecast = !flags.routing.empty() ? "--routing" : "--cold-router";
  refuse(request->budget_bytes == 0 && !(flags.routing.empty() && flags.cold_router.empty()),
         forecast, "no budget to compare with",
         "--budget beside it, or a --system with device_memory_bytes");
  if (!flags.cold_router.empty()) {
    request->cold_iterations =
        parse_int_flag(flags.cold_router, kWhere, "--cold-router", 1, 100000);
  }
  if (flags.routing.empty()) return;
  request->trace_name = flags.routing;
  RoutingTrace trace = read_routing_logs({flags.routing});
  for (const LeftOut& left : trace.left_out) request->trace_left_out += left.count;
  if (trace.per_expert) {
    trace = fold_experts(trace, request->job.layout.ep, flags.routing, "experts");
  }
  request->trace = iteration_loads(trace, request->job.model, flags.routing);
}

void set_system(const CommonPlanFlags& common, const SourceTree& tree, JobPlanRequest* request) {
  const std::string& system = common.system;
  request->system = system_from_file(
      resolve_system(system.empty() ? "h100" : system, tree, home_folder(), kWhere, "--system"));
  if (!common.budget.empty()) {
    request->budget_bytes = parse_bytes(common.budget, kWhere, "--budget");
  } else {
    request->budget_bytes = request->system.device_memory_bytes;
    request->budget_of_system = true;
  }
}

}  // namespace

void add_job_flags(CLI::App* app, JobFlags* flags) {
  const auto add = [&](const char* name, std::string* value, const char* type, const char* help) {
    app->add_option(name, *value, help)->type_name(type)->group("A job of another framework");
  };
  add("--layout", &flags->layout, "tp=2,pp=4,...",
      "ranks: tp, cp, pp, vpp, ep, etp, dp (absent ones 1), sp=0 to keep sequences whole under tp");
  add("--megatron-args", &flags->megatron_args, "FILE",
      "read the job from Megatron's arguments: a launch script, YAML, JSON or a plain list");
  add("--strategy", &flags->strategy, "FILE|NAME",
      "read layout and settings from a strategy file or a name from configs/strategies");
  add("--vocab", &flags->vocab, "TOKENS",
      "vocabulary, where --megatron-args names only a tokenizer");
  add("--stages", &flags->stages, "Et*3|t*4|...",
      "layers by virtual stage, as Megatron's --pipeline-model-parallel-layout [spread evenly]");
  add("--pipeline", &flags->pipeline, "ORDER",
      "1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, dualpipe, dualpipe-v [1f1b; interleaved with "
      "vpp]");
  add("--global-batch", &flags->global_batch, "SEQUENCES", "instead of --micro-batches");
  add("--recompute", &flags->recompute, "WHAT",
      "none, full, full:uniform:N, full:block:N, or modules as moe_act,layernorm");
  add("--offload", &flags->offload, "MODULES[@F]",
      "modules whose inputs go to the host, as expert_fc1,moe_act@0.5 (half of the groups)");
  add("--spike", &flags->spike, "MICROBATCH=FACTOR,...",
      "micro-batches with another imbalance than --imbalance");
  add("--routing", &flags->routing, "LOG",
      "recorded routing (`bagualu trace`): iterations over the budget in 1,000");
  add("--cold-router", &flags->cold_router, "ITERATIONS",
      "also plan for the first iterations of an untrained router");
  add("--emit", &flags->emit, "megatron",
      "print the job as Megatron's flags, in place of the table");
  add("--report", &flags->report, "FILE", "write a page with pictures");
  app->add_flag("--search", flags->search,
                "look for the fastest layout, order, micro-batch and recompute under the budget")
      ->group("A job of another framework");
}

bool is_job(const JobFlags& flags) {
  return flags.search || !flags.layout.empty() || !flags.megatron_args.empty() ||
         !flags.strategy.empty();
}

JobPlanRequest job_request(const JobFlags& flags, const CommonPlanFlags& common,
                           const SourceTree& tree) {
  JobPlanRequest request;
  const bool from_args = !flags.megatron_args.empty();
  refuse(from_args && !common.model.empty(), "--model", common.model,
         "nothing beside --megatron-args, which says the model");
  refuse(from_args && !flags.strategy.empty(), "--strategy", flags.strategy,
         "one of --strategy and --megatron-args");
  refuse(!flags.emit.empty() && flags.emit != "megatron", "--emit", flags.emit, "megatron");
  refuse(!from_args && !flags.vocab.empty(), "--vocab", flags.vocab,
         "only with --megatron-args; a model file says its own");
  Job& job = request.job;
  if (from_args) {
    job = job_from_megatron(flags, common, &request);
  } else {
    refuse(common.model.empty(), "--model", "nothing", "a file or a name");
    const std::filesystem::path path =
        resolve_config(common.model, config_folders(tree, "models"), kWhere, "--model");
    ReadModel read = read_model_file(path);
    if (read.spec.name.empty()) read.spec.name = path.stem().string();
    request.ignored = std::move(read.ignored);
    if (flags.strategy.empty()) {
      job.model = std::move(read.spec);
      job.optimizer.distributed = true;
    } else {
      job = job_from_strategy_file(
          resolve_config(flags.strategy, config_folders(tree, "strategies"), kWhere, "--strategy"),
          read.spec);
    }
  }
  set_layout(flags, common, &job);
  set_batch(flags, common, &job);
  if (!flags.recompute.empty()) job.recompute = parse_recompute(flags.recompute);
  if (!flags.offload.empty()) job.offload = parse_offload(flags.offload);
  validate(job, from_args ? flags.megatron_args : kWhere);
  set_system(common, tree, &request);
  set_loads(flags, common, &request);
  request.search = flags.search;
  request.search_alone =
      flags.search && flags.layout.empty() && flags.strategy.empty() && !from_args;
  return request;
}

}  // namespace bagualu
