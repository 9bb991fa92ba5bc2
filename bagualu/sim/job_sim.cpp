#include "bagualu/sim/job_sim.h"

#include <fmt/core.h>

#include <atomic>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/schedule/job_time.h"
#include "bagualu/sim/job_loop.h"
#include "bagualu/sim/replica_runner.h"

namespace bagualu {
namespace {

void check(bool holds, const char* field, int64_t found, const char* allowed) {
  if (!holds) throw InvalidInput("simulation", field, fmt::format("{}", found), allowed);
}

SimOptions checked(const Scenario& scenario, SimOptions options) {
  if (options.iterations == 0) options.iterations = scenario.iterations;
  check(options.iterations >= 1, "iterations", options.iterations, "1 or more");
  check(options.threads >= 1 && options.threads <= 1024, "threads", options.threads, "1 to 1024");
  check(options.series_limit >= 0, "series_limit", options.series_limit, "0 or more");
  check(options.most_deaths >= 1, "most_deaths", options.most_deaths, "1 or more");
  return options;
}

/// What is the same in every iteration, whatever the policy: the exchange of gradients, optimizer
/// and overhead do not depend on the routing.
JobFigures figures_of(const Scenario& scenario) {
  const Job& job = scenario.job;
  const JobTime time = job_time(job, scenario.system, {});
  JobFigures figures;
  figures.replicas = job.layout.expert_dp();
  figures.after_pipeline_ns =
      time.gradient_reduce_ns + time.parameter_gather_ns + time.optimizer_ns + time.overhead_ns;
  figures.tokens = job.micro_batch_size * job.seq * job.microbatches * job.layout.dp();
  figures.flops = time.model_flops;
  figures.peak_flops_per_s =
      peak_flops_per_s(job, scenario.system) * static_cast<double>(job.layout.world_size);
  return figures;
}

}  // namespace

SimRun simulate_job(const Scenario& scenario, const SimPolicy& policy, const SimOptions& options) {
  const SimOptions all = checked(scenario, options);
  const std::unique_ptr<RoutingSource> source = routing_of(scenario);
  auto first = std::make_unique<ReplicaRunner>(scenario, policy, all.levels, *source);
  SimRun run;
  if (const int64_t missing = first->short_by_bytes(); missing > 0) {
    run.short_by_bytes = missing;
  } else {
    // Every thread has one of its own; who comes first takes the one that is there.
    std::atomic_flag taken;
    const auto make_model = [&]() -> std::unique_ptr<ReplicaModel> {
      if (!taken.test_and_set()) return std::move(first);
      return std::make_unique<ReplicaRunner>(scenario, policy, all.levels, *source);
    };
    run = run_job(figures_of(scenario), scenario.interruptions, scenario.seed, make_model, all);
  }
  run.policy = policy;
  return run;
}

ReplicaTracer::ReplicaTracer(const Scenario& scenario, const SimPolicy& policy,
                             const SimOptions& options)
    : scenario_(scenario),
      source_(routing_of(scenario)),
      runner_(std::make_unique<ReplicaRunner>(scenario, policy, options.levels, *source_)) {}
ReplicaTracer::~ReplicaTracer() = default;

SimTracedReplica ReplicaTracer::trace(int64_t iteration, int64_t replica,
                                      std::vector<SimTrace> traces) {
  check(iteration >= 0, "iteration", iteration, "0 or more");
  check(replica >= 0 && replica < scenario_.job.layout.expert_dp(), "replica", replica,
        "below the number of copies of each expert");
  for (const SimTrace& trace : traces) {
    check(trace.pp_rank >= 0 && trace.pp_rank < scenario_.job.layout.pp, "pp_rank", trace.pp_rank,
          "a pipeline rank");
    check(trace.member >= 0 && trace.member < runner_->group().ranks, "member", trace.member,
          "a rank of the expert group");
  }
  SimTracedReplica traced;
  traced.traces = std::move(traces);
  traced.result = runner_->trace(draw_of(iteration, 0), replica, &traced.traces, &traced.programs);
  return traced;
}

const StageModel& ReplicaTracer::model() const { return runner_->model(); }

}  // namespace bagualu
