#include "bagualu/sim/validate_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "bagualu/base/error.h"
#include "bagualu/sim/run_replay.h"
#include "bagualu/sim/run_timing.h"

namespace bagualu {
namespace {

void compare(EqualCount& count, int64_t simulated, int64_t measured, const std::string& place) {
  ++count.compared;
  if (simulated == measured) return;
  if (count.different++ == 0)
    count.first = fmt::format("{}: {} for {}", place, simulated, measured);
}

std::string residencies_of(const std::string& plan) { return plan.substr(0, plan.find('/')); }

void compare_plans(const ReplayedRank& simulated, const LoggedRank& measured, size_t stages,
                   const std::string& rank, StepValidation& step) {
  for (size_t i = 0; i < measured.plans.size(); ++i) {
    const std::string place = fmt::format("{}, micro-batch {}", rank, i / stages);
    const std::string& mine = simulated.plans.at(i);
    const std::string a = residencies_of(mine), b = residencies_of(measured.plans[i]);
    ++step.plans.compared;
    if (mine != measured.plans[i] && step.plans.different++ == 0) {
      step.plans.first = fmt::format("{}: {} for {}", place, mine, measured.plans[i]);
    }
    for (size_t u = 0; u < std::max(a.size(), b.size()); ++u) {
      const char x = u < a.size() ? a[u] : '-', y = u < b.size() ? b[u] : '-';
      ++step.residencies.compared;
      if (x != y && step.residencies.different++ == 0) {
        step.residencies.first = fmt::format("{}, unit {}: {} for {}", place, u, x, y);
      }
    }
  }
}

void compare_bytes(const ReplayedRank& simulated, const LoggedRank& measured,
                   const std::string& rank, StepValidation& step) {
  compare(step.peaks, simulated.peak_bytes, measured.peak_bytes, rank);
  compare(step.host_peaks, simulated.host_peak_bytes, measured.host_peak_bytes, rank);
  compare(step.ends, simulated.end_bytes, measured.end_bytes, rank);
  compare(step.cache_hits, simulated.cache_hits, measured.cache_hits, rank);
  const size_t passes = std::max(simulated.passes.size(), measured.passes.size());
  for (size_t p = 0; p < passes; ++p) {
    const PassLevel a = p < simulated.passes.size() ? simulated.passes[p] : PassLevel{};
    const PassLevel b = p < measured.passes.size() ? measured.passes[p] : PassLevel{};
    compare(step.passes, a.peak_bytes, b.peak_bytes, fmt::format("{}, peak of pass {}", rank, p));
    compare(step.passes, a.live_bytes, b.live_bytes, fmt::format("{}, after pass {}", rank, p));
  }
}

void compare_points(const std::vector<LivePoint>& simulated, const LoggedStep& measured,
                    StepValidation& step) {
  const size_t points = std::max(simulated.size(), measured.memory.size());
  for (size_t i = 0; i < points; ++i) {
    const LivePoint a = i < simulated.size() ? simulated[i] : LivePoint{};
    const LivePoint b = i < measured.memory.size() ? measured.memory[i] : LivePoint{};
    const std::string place = fmt::format("action {}, {}", i, a.action);
    compare(step.points, a.live_bytes, b.live_bytes, place);
    if (a.action != b.action && step.points.different++ == 0) {
      step.points.first = fmt::format("{} for {}", place, b.action);
    }
  }
}

// A replay looks its loads up by gate.
void check_loads(const RunReplay& replay, const LoggedStep& logged, const std::string& where) {
  for (size_t r = 0; r < logged.ranks.size(); ++r) {
    const auto& stages = replay.stages(static_cast<int>(r));
    const auto& loads = logged.ranks[r].loads;
    for (size_t i = 0; i < loads.size(); ++i) {
      const size_t gates = stages[i % stages.size()]->graph.gates.size();
      if (loads[i].size() == gates) continue;
      throw InvalidInput(where, fmt::format("step {}, ranks[{}].loads[{}]", logged.step, r, i),
                         fmt::format("{} layers", loads[i].size()),
                         fmt::format("{}: the stage's layers with experts", gates));
    }
  }
}

StepValidation compare_step(const ReplayedStep& simulated, const LoggedStep& measured,
                            size_t stages) {
  StepValidation step;
  step.step = measured.step;
  step.spike = measured.spike;
  step.measured_ns = measured.step_ns;
  for (size_t r = 0; r < measured.ranks.size(); ++r) {
    const std::string rank = fmt::format("rank {}", r);
    compare_plans(simulated.ranks[r], measured.ranks[r], stages, rank, step);
    compare_bytes(simulated.ranks[r], measured.ranks[r], rank, step);
  }
  // Rank 0 has the log to write, so the others' steps begin before its own, and wait.
  step.measured_passes_ns = measured.ranks[0].passes_ns;
  if (measured.memory_rank >= 0) {
    compare_points(simulated.ranks[static_cast<size_t>(measured.memory_rank)].memory, measured,
                   step);
  }
  return step;
}

template <class Number>
Number nearest_rank(std::vector<Number> values, double fraction) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto at = static_cast<size_t>(std::ceil(fraction * static_cast<double>(values.size())));
  return values[std::max<size_t>(at, 1) - 1];
}

bool calibrates(size_t step, int64_t calibrating) {
  return step > 0 && static_cast<int64_t>(step) <= calibrating;
}

// What no profile has. Decisions run on the computing thread: means by their place in the step.
class Calibration {
 public:
  explicit Calibration(size_t ranks) : sums_(ranks) {}

  void add(const ReplayedStep& simulated, const LoggedStep& logged) {
    after_.push_back(logged.step_ns - logged.ranks[0].passes_ns);
    ++steps_;
    for (size_t r = 0; r < sums_.size(); ++r) {
      const std::vector<DecisionPlace>& places = simulated.ranks[r].decisions;
      const std::vector<int64_t>& times = logged.ranks[r].decision_ns;
      if (places.size() != times.size()) continue;  // decided otherwise: said by the comparison
      for (size_t i = 0; i < places.size(); ++i) sums_[r][places[i]] += times[i];
    }
  }

  std::vector<DecisionTimes> decisions() const {
    std::vector<DecisionTimes> means = sums_;
    for (DecisionTimes& rank : means) {
      for (auto& [place, ns] : rank) ns /= std::max<int64_t>(steps_, 1);
    }
    return means;
  }

  OutsideTimes outside() const {
    OutsideTimes times;
    times.after_ns = nearest_rank(after_, 0.5);
    for (const DecisionTimes& rank : decisions()) {
      int64_t sum = 0;
      for (const auto& [place, ns] : rank) sum += ns;
      times.decisions_ns = std::max(times.decisions_ns, sum);
    }
    return times;
  }

 private:
  std::vector<DecisionTimes> sums_;
  std::vector<int64_t> after_;
  int64_t steps_ = 0;
};

void summarise(RunValidation& all) {
  std::vector<double> distances, errors, passes;
  for (const StepValidation& step : all.steps) {
    for (EqualCount StepValidation::*count :
         {&StepValidation::residencies, &StepValidation::plans, &StepValidation::peaks,
          &StepValidation::passes, &StepValidation::points, &StepValidation::host_peaks,
          &StepValidation::ends, &StepValidation::cache_hits}) {
      (all.total.*count).add(step.*count);
    }
    if (step.predicted_ns == 0) continue;
    ++all.timed_steps;
    errors.push_back(step.error());
    distances.push_back(std::abs(step.error()));
    passes.push_back(std::abs(static_cast<double>(step.predicted_passes_ns) /
                                  static_cast<double>(step.measured_passes_ns) -
                              1));
  }
  all.median_error = nearest_rank(distances, 0.5);
  all.p90_error = nearest_rank(distances, 0.9);
  all.bias = nearest_rank(errors, 0.5);
  all.median_passes_error = nearest_rank(passes, 0.5);
}

}  // namespace

void EqualCount::add(const EqualCount& other) {
  compared += other.compared;
  if (different == 0) first = other.first;
  different += other.different;
}

RunValidation validate_run(const LoggedRun& run, const std::string& where,
                           const ValidateOptions& options) {
  RunValidation all;
  int64_t steps = 0;
  for (const LoggedStart& start : run.starts) steps += static_cast<int64_t>(start.steps.size());
  for (const LoggedStart& start : run.starts) {
    if (start.steps.empty()) continue;  // killed, or resumed from before it
    RunReplay replay(run.model, start, where);
    const SimLinks links = run_links(start, replay);
    replay.set_counts_exchange_ns(links.latency_ns);
    RunTiming timing(links, start);
    Calibration calibration(static_cast<size_t>(start.setup.layout.world_size));
    const auto stages = static_cast<size_t>(start.setup.layout.stages_per_rank());
    for (size_t i = 0; i < start.steps.size(); ++i) {
      const LoggedStep& logged = start.steps[i];
      check_loads(replay, logged, where);
      const ReplayedStep simulated = replay.step(logged, options.times);
      StepValidation step = compare_step(simulated, logged, stages);
      step.calibrates = calibrates(i, options.calibrating_steps);
      if (step.calibrates && !simulated.repeated) {
        calibration.add(simulated, logged);
        all.outside = calibration.outside();
        replay.set_decision_times(calibration.decisions());
      }
      // The first step of a start warms caches; a repeated one's programs are of its second run.
      if (options.times && !simulated.repeated && i > 0 && !step.calibrates) {
        step.predicted_passes_ns = timing.passes_ns(simulated, logged);
        step.predicted_ns = step.predicted_passes_ns + all.outside.after_ns;
      }
      all.steps.push_back(std::move(step));
      if (options.progress) options.progress(static_cast<int64_t>(all.steps.size()), steps);
    }
  }
  summarise(all);
  return all;
}

}  // namespace bagualu
