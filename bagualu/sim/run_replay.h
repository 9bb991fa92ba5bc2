// Decides a real run again: every rank's driver, with the loads that its log has, votes included.
// Nothing is executed; bytes follow from the same replay that the runtime predicts with.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bagualu/provision/training_rank.h"
#include "bagualu/sim/program_recorder.h"
#include "bagualu/sim/run_log.h"

namespace bagualu {

struct DecisionPlace {
  int stage = -1;
  int microbatch = -1;
  int gate = -1;
  auto operator<=>(const DecisionPlace&) const = default;
};
/// Times of one rank's decisions.
using DecisionTimes = std::map<DecisionPlace, int64_t>;

/// What a rank would do in a step. Entries and passes as LoggedRank's.
struct ReplayedRank {
  int64_t peak_bytes = 0;
  int64_t host_peak_bytes = 0;
  int64_t end_bytes = 0;
  std::vector<std::string> plans;
  std::vector<PassLevel> passes;
  std::vector<LivePoint> memory;  ///< of the ranks it was asked of
  std::vector<DecisionPlace> decisions;
  int64_t cache_hits = 0;
  bool died = false;    ///< some pass exceeded a budget
  StepProgram program;  ///< if asked for
};

struct ReplayedStep {
  std::vector<ReplayedRank> ranks;
  bool repeated = false;
};

/// One start of a run. Policies remember what they decided: steps come in the log's order, all of
/// them.
/// Cost: of a step, the decisions that its ranks made; those of an expert group side by side.
class RunReplay {
 public:
  /// Throws: InvalidInput for a model, profile or policy that do not fit together.
  RunReplay(const ModelSpec& model, const LoggedStart& start, const std::string& where);
  ~RunReplay();

  /// programs: also compile what every rank does (of a repeated step, the last run).
  ReplayedStep step(const LoggedStep& logged, bool programs = false);

  /// In programs the exchange of counts behind a router is one of its own; the profile's router
  /// waits for it inside its time, so that much is taken off.
  void set_counts_exchange_ns(int64_t exchange_ns);

  /// What decisions take in programs from now on, by rank; nothing where a place is not in there.
  void set_decision_times(std::vector<DecisionTimes> times);

  const std::vector<std::unique_ptr<TrainerStage>>& stages(int rank) const;

 private:
  class Rank;
  void drive(const LoggedStep& logged, bool programs, ReplayedStep& result);

  std::vector<std::unique_ptr<Rank>> ranks_;
  int64_t group_size_ = 1;
};

}  // namespace bagualu
