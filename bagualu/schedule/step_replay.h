// Time of a step from what its ranks execute: their lists of events and the time of each alone.
// Compared with the measured step it says whether a rank did what was planned, when it was planned.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "bagualu/schedule/step_trace.h"

namespace bagualu {

/// Times of one step's parts alone, without waiting.
/// Shapes:  as the ranks of the step and their events and transfers
struct ReplayTimes {
  std::vector<int64_t> start_ns;               ///< by rank, after the first one's start
  std::vector<std::vector<int64_t>> lead_ns;   ///< between an event and the one before it
  std::vector<std::vector<int64_t>> event_ns;  ///< its own work
  /// From when every member has issued it and the channel is free on each, until its end on this
  /// rank.
  std::vector<std::vector<int64_t>> transfer_ns;
  std::vector<int64_t> tail_ns;  ///< by rank, from its last event to the end of its step
};

/// The times that a traced step shows. An event that waited counts from the end of what it awaited.
/// Requires: the ranks of one step, step_fault() without complaint.
/// Throws:   InvalidInput("step trace", ...) if members of a transfer are missing from the trace
///           (a key that stands on one rank only).
ReplayTimes measured_times(const std::vector<RankStep>& ranks);

/// Means over steps: of events by rank, stage, action and name, of transfers by rank, the action
/// that issues them and name. The longest kTail of a part's times are left out: when a rank loses
/// its core for a while, the event in which it does and the transfer that others await both last
/// longer, and one step would count the loss twice. A median would not count it at all.
class MeanTimes {
 public:
  static constexpr double kTail = 0.05;
  void add(const std::vector<RankStep>& ranks, const ReplayTimes& times);
  /// Times of a step in which every part takes its mean; a part never added takes its own.
  ReplayTimes of(const std::vector<RankStep>& ranks) const;

 private:
  using Key = std::tuple<int, int, int, std::string>;  ///< rank, stage, action, name
  using Samples = std::map<Key, std::vector<int64_t>>;
  template <class Visit>
  static void each(const std::vector<RankStep>& ranks, ReplayTimes& times, const Visit& visit);

  Samples samples_;
};

struct ReplayInterval {
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  bool operator==(const ReplayInterval&) const = default;
};

/// Times count from the first rank's start.
struct StepReplay {
  std::vector<std::vector<ReplayInterval>> events;     ///< by rank; waiting included
  std::vector<std::vector<ReplayInterval>> transfers;  ///< by rank; start: all members are there
  std::vector<int64_t> wait_ns;                        ///< by rank, inside its events
  int64_t step_ns = 0;                                 ///< until the last rank's end
};

/// All ranks together. A rank runs its events in order, each when the one before it and what it
/// awaits have ended. A transfer starts when every member has issued it and, on each, the one
/// before it on its channel has ended.
/// Throws:  InternalError naming each waiting rank's event and transfer if they wait for each
/// other:
///          members that issue their transfers in different orders.
/// Cost:    O((events + transfers) * ranks)
StepReplay replay_step(const std::vector<RankStep>& ranks, const ReplayTimes& times);

constexpr int64_t kNeighbours = 2;
constexpr double kDisturbed = 1.3;

/// Times of each step from the traced steps around it, kNeighbours on either side, never from
/// itself: a machine that slows down does so for a while. Those that took over kDisturbed times as
/// long as the fastest of them are left out: what disturbed them says nothing of this one. A single
/// step takes its own times.
/// Shapes:  `steps` by number, each the ranks of one step; result in the same order
/// Throws:  as measured_times()
std::vector<ReplayTimes> neighbour_times(const std::map<int64_t, std::vector<RankStep>>& steps);

/// A step's time, measured and predicted.
struct StepPrediction {
  int64_t step = 0;
  int64_t measured_ns = 0;
  /// Of a replay with neighbour_times().
  int64_t predicted_ns = 0;
  double error() const {  ///< relative, positive if predicted too long
    return static_cast<double>(predicted_ns - measured_ns) / static_cast<double>(measured_ns);
  }
};

/// Predictions of all steps that every rank of the trace has. (A replay with the step's own times
/// is the step itself and would predict nothing.) Throws:  as measured_times() and replay_step()
/// Cost:    O(steps * events)
std::vector<StepPrediction> predict_steps(const std::vector<RankStep>& trace);

/// step_ns of the ranks of one step, as measured: the first start to the last end.
int64_t measured_step_ns(const std::vector<RankStep>& ranks);

}  // namespace bagualu
