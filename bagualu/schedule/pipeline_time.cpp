#include "bagualu/schedule/pipeline_time.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "bagualu/schedule/pipeline.h"

namespace bagualu {
namespace {

/// Longest of the paths that run down to a rank, through all its passes, and back up; a rank's
/// passes are bounded below by what it does and by what it waits for.
double one_f_one_b_ns(const std::vector<StagePasses>& stages, double microbatches) {
  double below = 0;  // forward and backward of the stages behind
  for (const StagePasses& stage : stages) below += stage.total_ns();
  double above = 0;  // of the stages before
  double longest = 0;
  const double p = static_cast<double>(stages.size());
  for (size_t s = 0; s < stages.size(); ++s) {
    const StagePasses& stage = stages[s];
    below -= stage.total_ns();
    // In flight at once: further forwards run between the backwards.
    const double ahead = std::min(microbatches, p - static_cast<double>(s));
    const double filling = std::max(ahead * stage.forward_ns, stage.forward_ns + below);
    const double rest =
        microbatches * stage.backward_ns() + (microbatches - ahead) * stage.forward_ns;
    longest = std::max(longest, above + filling + rest);
    above += stage.total_ns();
  }
  return longest;
}

/// What a rank does for one micro-batch, and how many virtual stages it holds.
StagePasses rank_passes(const std::vector<StagePasses>& stages, int64_t pp, int64_t rank,
                        PipelineKind kind) {
  StagePasses held;
  const auto add = [&](int64_t stage, double share) {
    const StagePasses& passes = stages[static_cast<size_t>(stage)];
    held.forward_ns += share * passes.forward_ns;
    held.input_gradient_ns += share * passes.input_gradient_ns;
    held.weight_gradient_ns += share * passes.weight_gradient_ns;
  };
  if (kind == PipelineKind::kDualPipe) {  // half of the micro-batches run through the other copy
    add(rank, 0.5);
    add(pp - 1 - rank, 0.5);
    return held;
  }
  if (is_v_shaped(kind)) {
    add(rank, 1);
    add(2 * pp - 1 - rank, 1);
    return held;
  }
  for (int64_t s = rank; s < static_cast<int64_t>(stages.size()); s += pp) add(s, 1);
  return held;
}

StagePasses mean_passes(const std::vector<StagePasses>& stages) {
  StagePasses mean;
  const double count = static_cast<double>(stages.size());
  for (const StagePasses& stage : stages) {
    mean.forward_ns += stage.forward_ns / count;
    mean.input_gradient_ns += stage.input_gradient_ns / count;
    mean.weight_gradient_ns += stage.weight_gradient_ns / count;
  }
  return mean;
}

/// Idle time of a rank in orders without a closed form, in forwards of one stage, by simulation of
/// equal stages. It depends on the ratios of the passes, taken to 1/64, and no longer on the number
/// of micro-batches once every rank has reached its steady turn; so few runs serve a whole search.
double simulated_ramp(PipelineKind kind, int pp, int microbatches, const StagePasses& mean) {
  constexpr double kSteps = 64;
  constexpr int kSteadyTurns = 4;
  using Key = std::array<int, 5>;
  thread_local std::map<Key, double> known;
  int simulated = std::min(microbatches, kSteadyTurns * pp);
  if (simulated < microbatches && (microbatches - simulated) % 2 != 0) ++simulated;
  const auto ratio = [&](double ns) {
    return static_cast<int>(std::lround(std::min(ns / mean.forward_ns, 1e4) * kSteps));
  };
  const Key key = {static_cast<int>(kind), pp, simulated, ratio(mean.input_gradient_ns),
                   ratio(mean.weight_gradient_ns)};
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  const int per_rank = is_v_shaped(kind) ? 2 : 1;
  const PipelineOrder order = make_order(kind, pp, per_rank, simulated);
  const PassTimes times{.forward_ns = static_cast<int64_t>(kSteps),
                        .input_grad_ns = key[3],
                        .weight_grad_ns = key[4]};
  const double makespan =
      static_cast<double>(simulate(order, equal_times(order, times)).makespan_ns);
  const double busy = simulated * per_rank * (kSteps + key[3] + key[4]);
  const double ramp = (makespan - busy) / kSteps;
  if (known.size() > 4096) known.clear();
  known.emplace(key, ramp);
  return ramp;
}

/// Idle time of equal stages like the mean one.
double mean_ramp(PipelineKind kind, const StagePasses& mean, int64_t pp, int64_t microbatches) {
  const double others = static_cast<double>(pp - 1);
  if (kind == PipelineKind::kInterleaved) return others * mean.total_ns();
  if (kind == PipelineKind::kZbH1) {
    return std::max(0.0,
                    others * (mean.forward_ns + mean.input_gradient_ns - mean.weight_gradient_ns));
  }
  if (!(mean.forward_ns > 0)) return 0;
  return mean.forward_ns *
         simulated_ramp(kind, static_cast<int>(pp), static_cast<int>(microbatches), mean);
}

/// Until a rank's first pass and after its last.
double fill_ns(PipelineKind kind, int64_t rank, int64_t pp, const StagePasses& mean) {
  const int64_t before = kind == PipelineKind::kDualPipe ? std::min(rank, pp - 1 - rank) : rank;
  return static_cast<double>(before) * (mean.forward_ns + mean.input_gradient_ns);
}

/// Either the ranks are alike and idle as equal ones do, or the slowest sets the pace and idles
/// only until its first pass and after its last.
double ramped_ns(PipelineKind kind, const std::vector<StagePasses>& stages, int64_t pp,
                 int64_t microbatches) {
  const double m = static_cast<double>(microbatches);
  const StagePasses mean = mean_passes(stages);
  const double ramp = mean_ramp(kind, mean, pp, microbatches);
  double alike = 0, slowest = 0;
  for (int64_t rank = 0; rank < pp; ++rank) {
    const double busy = m * rank_passes(stages, pp, rank, kind).total_ns();
    // Interleaved and V-Half leave a rank little room: what idles at the ends stays idle.
    const double own = kind == PipelineKind::kInterleaved ? ramp
                       : kind == PipelineKind::kVHalf     ? 0.75 * ramp
                                                          : fill_ns(kind, rank, pp, mean);
    alike += busy / static_cast<double>(pp);
    slowest = std::max(slowest, busy + std::min(own, ramp));
  }
  return std::max(alike + ramp, slowest);
}

}  // namespace

double pipeline_ns(PipelineKind kind, const std::vector<StagePasses>& stages, int64_t pp,
                   int64_t microbatches) {
  if (kind == PipelineKind::k1F1B) {
    return one_f_one_b_ns(stages, static_cast<double>(microbatches));
  }
  return ramped_ns(kind, stages, pp, microbatches);
}

}  // namespace bagualu
