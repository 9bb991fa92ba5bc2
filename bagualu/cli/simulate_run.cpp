// Runs what `bagualu simulate` was asked: every policy of every scenario, then pictures.

#include <fmt/format.h>

#include <algorithm>

#include "bagualu/cli/interrupt.h"
#include "bagualu/cli/progress_line.h"
#include "bagualu/cli/simulate_command.h"
#include "bagualu/cli/simulate_perfetto.h"

namespace bagualu {
namespace {

/// Device iterations: the unit of progress.
double work_of(const SimulateRequest& request, const Scenario& scenario) {
  return static_cast<double>(request.iterations_of(scenario)) *
         static_cast<double>(scenario.job.layout.world_size);
}

double total_work(const SimulateRequest& request) {
  double total = 0;
  for (const Scenario& scenario : request.scenarios) {
    total += work_of(request, scenario) * static_cast<double>(scenario.policies.size());
  }
  return total;
}

class Run {
 public:
  Run(const SimulateRequest& request, const Simulator& simulator, std::ostream& progress)
      : request_(request),
        simulator_(simulator),
        line_(progress, request.live, total_work(request)) {}

  SimulateAnswer all() {
    for (const Scenario& scenario : request_.scenarios) {
      SimulatedScenario& simulated = answer_.report.scenarios.emplace_back();
      simulated.scenario = scenario;
      simulated.iterations = request_.iterations_of(scenario);
      for (const SimPolicy& policy : scenario.policies) {
        if (stopped()) return finish(false);
        add_policy(&simulated, policy);
        if (!simulated.policies.back().complete) return finish(false);
      }
    }
    return finish(true);
  }

 private:
  static bool stopped() { return InterruptGuard::signal() != 0; }

  SimulateAnswer finish(bool complete) {
    answer_.report.complete = complete;
    if (request_.wants_perfetto) answer_.perfetto = perfetto_.take();
    line_.clear();
    return std::move(answer_);
  }

  void add_policy(SimulatedScenario* simulated, const SimPolicy& policy) {
    const Scenario& scenario = simulated->scenario;
    const std::string what = fmt::format("{}, {}", scenario.name, policy.label);
    const auto devices = static_cast<double>(scenario.job.layout.world_size);
    line_.show(what, done_work_);
    SimOptions options = request_.options;
    options.iterations = simulated->iterations;
    bool cut = false;
    options.progress = [&](int64_t done, int64_t total) {
      line_.show(fmt::format("{}: {} of {} iterations", what, done, total),
                 done_work_ + static_cast<double>(done) * devices);
      cut = done < total && stopped();
      return !cut;
    };
    SimulatedPolicy made;
    made.run = simulator_.run(scenario, policy, options);
    made.complete = !cut;
    done_work_ += work_of(request_, scenario);
    options.progress = nullptr;
    if (made.complete) add_pictures(scenario, options, &made);
    simulated->policies.push_back(std::move(made));
  }

  void add_pictures(const Scenario& scenario, const SimOptions& options, SimulatedPolicy* made) {
    const int64_t spike = spike_of(made->run);
    if (spike < 0) return;
    if (request_.wants_page) {
      line_.show(fmt::format("{}, {}: pictures", scenario.name, made->run.policy.label),
                 done_work_);
      made->detail.push_back(spike_detail(simulator_, scenario, made->run, options));
    }
    if (request_.wants_perfetto) {
      const int64_t iteration = request_.trace_iteration >= 0 ? request_.trace_iteration : spike;
      const std::string label = request_.scenarios.size() > 1
                                    ? scenario.name + ", " + made->run.policy.label
                                    : made->run.policy.label;
      perfetto_.add(label, simulator_.trace(scenario, made->run.policy, options, iteration,
                                            request_.perfetto_ranks));
    }
  }

  const SimulateRequest& request_;
  const Simulator& simulator_;
  ProgressLine line_;
  SimulatePerfetto perfetto_;
  SimulateAnswer answer_;
  double done_work_ = 0;
};

}  // namespace

SimulateAnswer simulate(const SimulateRequest& request, const Simulator& simulator,
                        std::ostream& progress) {
  return Run(request, simulator, progress).all();
}

}  // namespace bagualu
