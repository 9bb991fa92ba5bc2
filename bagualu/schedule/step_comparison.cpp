#include "bagualu/schedule/step_comparison.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace bagualu {
namespace {

// The lists of a step with the replay's times in place of the measured ones.
std::vector<RankStep> scheduled_step(const std::vector<RankStep>& executed,
                                     const ReplayTimes& times, const StepReplay& replay) {
  std::vector<RankStep> result = executed;
  for (size_t r = 0; r < result.size(); ++r) {
    RankStep& rank = result[r];
    rank.start_ns = rank.end_ns = times.start_ns[r];
    for (size_t i = 0; i < rank.events.size(); ++i) {
      StepEvent& event = rank.events[i];
      event.start_ns = replay.events[r][i].start_ns;
      event.end_ns = rank.end_ns = replay.events[r][i].end_ns;
      for (int number : event.issues) {
        const bool synchronous =
            std::find(event.awaits.begin(), event.awaits.end(), number) != event.awaits.end();
        // The replay's interval begins when all members are there.
        StepTransfer& transfer = rank.transfers[static_cast<size_t>(number)];
        transfer.start_ns = synchronous ? event.start_ns : event.end_ns;
        transfer.end_ns = replay.transfers[r][static_cast<size_t>(number)].end_ns;
      }
    }
    rank.end_ns += times.tail_ns[r];
  }
  return result;
}

std::vector<std::vector<int64_t>> waits(const std::vector<RankStep>& ranks,
                                        const ReplayTimes& times) {
  std::vector<std::vector<int64_t>> result;
  for (size_t r = 0; r < ranks.size(); ++r) {
    result.emplace_back();
    for (size_t i = 0; i < ranks[r].events.size(); ++i) {
      const StepEvent& event = ranks[r].events[i];
      const int64_t wait = event.end_ns - event.start_ns - times.event_ns[r][i];
      result.back().push_back(event.awaits.empty() ? 0 : std::max<int64_t>(0, wait));
    }
  }
  return result;
}

StepComparison compare(std::vector<RankStep> executed, const ReplayTimes& measured,
                       const ReplayTimes& medians) {
  const StepReplay replay = replay_step(executed, medians);
  StepComparison result;
  result.step = executed.front().step;
  result.scheduled = scheduled_step(executed, medians, replay);
  result.executed_wait_ns = waits(executed, measured);
  result.scheduled_wait_ns = waits(result.scheduled, medians);
  result.measured_ns = measured_step_ns(executed);
  result.predicted_ns = replay.step_ns;
  result.executed = std::move(executed);
  return result;
}

}  // namespace

StepComparisons compare_steps(const std::vector<RankStep>& steps) {
  std::map<int64_t, std::vector<RankStep>> by_step;
  std::set<int> ranks;
  for (const RankStep& step : steps) {
    by_step[step.step].push_back(step);
    ranks.insert(step.rank);
  }
  StepComparisons result;
  for (auto at = by_step.begin(); at != by_step.end();) {
    const bool whole = at->second.size() == ranks.size();
    if (!whole) result.left_out.push_back(at->first);
    at = whole ? std::next(at) : by_step.erase(at);
  }
  const std::vector<ReplayTimes> typical = neighbour_times(by_step);
  for (auto& [number, step] : by_step) {
    const ReplayTimes measured = measured_times(step);
    const size_t i = result.steps.size();
    result.steps.push_back(compare(std::move(step), measured, typical[i]));
  }
  return result;
}

}  // namespace bagualu
