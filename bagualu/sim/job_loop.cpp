#include "bagualu/sim/job_loop.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/sim/job_clock.h"
#include "bagualu/sim/parallel_tasks.h"

namespace bagualu {
namespace {

constexpr double kNsPerS = 1e9;
/// Tasks of a thread between two joins: enough that threads seldom wait for the slowest.
constexpr int64_t kTasksPerThread = 16;

/// Replicas meet at the exchange of gradients: the slowest counts. If ranks died, the first did.
ReplicaOutcome join(const ReplicaOutcome* replicas, int64_t count) {
  ReplicaOutcome all;
  int64_t death_ns = std::numeric_limits<int64_t>::max();
  for (int64_t r = 0; r < count; ++r) {
    const ReplicaOutcome& one = replicas[r];
    if (one.died) death_ns = std::min(death_ns, one.end_ns);
    all.died = all.died || one.died;
    all.repeat_step = all.repeat_step || one.repeat_step;
    all.end_ns = std::max(all.end_ns, one.end_ns);
    all.peak_bytes = std::max(all.peak_bytes, one.peak_bytes);
    all.mitigated_ranks += one.mitigated_ranks;
    all.events += one.events;
    all.imbalance = std::max(all.imbalance, one.imbalance);
  }
  if (all.died) all.end_ns = death_ns;
  return all;
}

/// Replicas of several iterations at a time, spread over threads. What a replica does depends on
/// its draw alone, so neither threads nor the size of a batch change a result.
class Replicas {
 public:
  Replicas(int64_t replicas, int threads,
           const std::function<std::unique_ptr<ReplicaModel>()>& make_model)
      : replicas_(replicas),
        threads_(threads),
        make_model_(make_model),
        models_(static_cast<size_t>(threads)) {}

  std::vector<ReplicaOutcome> run(const std::vector<int64_t>& draws) {
    std::vector<ReplicaOutcome> outcomes = run(draws, &ReplicaModel::run);
    std::vector<int64_t> again;
    for (size_t i = 0; i < draws.size(); ++i) {
      if (outcomes[i].repeat_step && !outcomes[i].died) again.push_back(draws[i]);
    }
    if (again.empty()) return outcomes;
    const std::vector<ReplicaOutcome> repeated = run(again, &ReplicaModel::repeat);
    size_t next = 0;
    for (ReplicaOutcome& outcome : outcomes) {
      if (!outcome.repeat_step || outcome.died) continue;
      const ReplicaOutcome& second = repeated[next++];
      outcome.end_ns += second.end_ns;
      outcome.died = second.died;
      outcome.peak_bytes = std::max(outcome.peak_bytes, second.peak_bytes);
      outcome.events += second.events;
    }
    return outcomes;
  }

 private:
  using Call = ReplicaOutcome (ReplicaModel::*)(int64_t draw, int64_t replica);

  std::vector<ReplicaOutcome> run(const std::vector<int64_t>& draws, Call call) {
    const int64_t count = static_cast<int64_t>(draws.size()) * replicas_;
    results_.assign(static_cast<size_t>(count), {});
    run_tasks(threads_, count, [&](int worker, int64_t i) {
      std::unique_ptr<ReplicaModel>& model = models_[static_cast<size_t>(worker)];
      if (model == nullptr) model = make_model_();
      results_[static_cast<size_t>(i)] =
          ((*model).*call)(draws[static_cast<size_t>(i / replicas_)], i % replicas_);
    });
    std::vector<ReplicaOutcome> outcomes;
    for (size_t i = 0; i < draws.size(); ++i) {
      outcomes.push_back(join(&results_[i * static_cast<size_t>(replicas_)], replicas_));
    }
    return outcomes;
  }

  const int64_t replicas_;
  const int threads_;
  const std::function<std::unique_ptr<ReplicaModel>()>& make_model_;
  std::vector<std::unique_ptr<ReplicaModel>> models_;  ///< by worker
  std::vector<ReplicaOutcome> results_;                ///< [draw][replica]
};

class JobLoop {
 public:
  JobLoop(const JobFigures& figures, const Interruptions& interruptions, uint64_t seed,
          const std::function<std::unique_ptr<ReplicaModel>()>& make_model,
          const SimOptions& options)
      : figures_(figures),
        options_(options),
        clock_(interruptions, seed),
        replicas_(figures.replicas, std::max(1, options.threads), make_model) {}

  SimRun run();

 private:
  bool run_iteration(int64_t iteration, ReplicaOutcome outcome);
  void note(int64_t iteration, const ReplicaOutcome& outcome);
  void describe();

  const JobFigures& figures_;
  const SimOptions& options_;
  JobClock clock_;
  Replicas replicas_;
  SimRun run_;
  int64_t best_ns_ = std::numeric_limits<int64_t>::max();
};

SimRun JobLoop::run() {
  const int64_t total = options_.iterations;
  const int64_t threads = std::max(1, options_.threads);
  const int64_t batch =
      threads == 1 ? 1 : std::max<int64_t>(1, threads * kTasksPerThread / figures_.replicas);
  bool going = true;
  for (int64_t begin = 0; begin < total && going; begin += batch) {
    std::vector<int64_t> draws;
    for (int64_t i = begin; i < std::min(total, begin + batch); ++i) draws.push_back(draw_of(i, 0));
    const std::vector<ReplicaOutcome> outcomes = replicas_.run(draws);
    for (size_t i = 0; i < outcomes.size() && going; ++i) {
      const int64_t iteration = begin + static_cast<int64_t>(i);
      going = run_iteration(iteration, outcomes[i]) &&
              (!options_.progress || options_.progress(iteration + 1, total));
    }
  }
  describe();
  return std::move(run_);
}

/// False if the job does not get past it.
bool JobLoop::run_iteration(int64_t iteration, ReplicaOutcome outcome) {
  for (int64_t attempt = 1; outcome.died; ++attempt) {
    note(iteration, outcome);
    clock_.die(outcome.end_ns);
    if (attempt == options_.most_deaths) {
      run_.unable_iteration = iteration;
      return false;
    }
    outcome = replicas_.run({draw_of(iteration, attempt)}).front();
  }
  note(iteration, outcome);
  const int64_t ns = outcome.end_ns + figures_.after_pipeline_ns;
  clock_.complete(ns);
  best_ns_ = std::min(best_ns_, ns);
  run_.repeated_steps += outcome.repeat_step ? 1 : 0;
  run_.mitigated_iterations += outcome.mitigated_ranks > 0 ? 1 : 0;
  return true;
}

void JobLoop::note(int64_t iteration, const ReplicaOutcome& outcome) {
  run_.events += outcome.events;
  run_.peak_bytes = std::max(run_.peak_bytes, outcome.peak_bytes);
  // Deaths are kept one and all: each costs a restart, so they stay few.
  if (!outcome.died && !is_kept(iteration, options_.iterations, options_.series_limit)) return;
  SimIteration kept;
  kept.iteration = iteration;
  kept.imbalance = outcome.imbalance;
  kept.pipeline_ns = outcome.end_ns;
  kept.iteration_ns = outcome.end_ns + (outcome.died ? 0 : figures_.after_pipeline_ns);
  kept.peak_bytes = outcome.peak_bytes;
  kept.mitigated_ranks = outcome.mitigated_ranks;
  kept.repeated = outcome.repeat_step;
  kept.died = outcome.died;
  run_.series.push_back(kept);
}

void JobLoop::describe() {
  const JobTotals& totals = clock_.totals();
  const auto seconds = [](int64_t ns) { return static_cast<double>(ns) / kNsPerS; };
  run_.iterations = totals.completed;
  run_.tokens = totals.completed * figures_.tokens;
  run_.seconds = seconds(totals.wall_ns);
  run_.seconds_calm = seconds(totals.useful_ns);
  run_.restart_s = seconds(totals.restart_ns);
  run_.lost_s = seconds(totals.lost_ns);
  run_.checkpoint_s = seconds(totals.checkpoint_ns);
  run_.ooms = totals.ooms;
  run_.failures = totals.failures;
  run_.lost_iterations = totals.lost_iterations;
  if (totals.useful_ns == 0) return;  // nothing completed: rates stay 0
  const double tokens = static_cast<double>(run_.tokens);
  const double flops = static_cast<double>(totals.completed) * figures_.flops;
  run_.tokens_per_s = tokens / run_.seconds;
  run_.tokens_per_s_calm = tokens / run_.seconds_calm;
  run_.flops_per_s = flops / run_.seconds;
  run_.mfu_fraction = run_.flops_per_s / figures_.peak_flops_per_s;
  run_.mfu_calm_fraction = flops / run_.seconds_calm / figures_.peak_flops_per_s;
  run_.best_mfu_fraction = figures_.flops / seconds(best_ns_) / figures_.peak_flops_per_s;
}

}  // namespace

int64_t draw_of(int64_t iteration, int64_t attempt) {
  // A prime, far behind any job's end: no draw is met twice, and a recorded trace, which starts
  // over behind its last iteration, is at another place of its own.
  constexpr int64_t kRedraw = 1'000'003;
  return iteration + attempt * kRedraw;
}

SimRun run_job(const JobFigures& figures, const Interruptions& interruptions, uint64_t seed,
               const std::function<std::unique_ptr<ReplicaModel>()>& make_model,
               const SimOptions& options) {
  BGL_CHECK(figures.replicas >= 1, figures.replicas);
  return JobLoop(figures, interruptions, seed, make_model, options).run();
}

}  // namespace bagualu
