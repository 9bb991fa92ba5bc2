#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "bagualu/sim/job_sim.h"
#include "bagualu/sim/rank_places.h"
#include "bagualu/sim/scenario.h"

namespace bagualu {

/// One rank of an iteration, stream by stream.
struct TracedRank {
  int64_t rank = 0;  ///< number in the job
  RankPlace place;
  int64_t static_bytes = 0;
  int64_t peak_bytes = 0;  ///< workspaces included
  std::vector<SimTraceEvent> events;
  std::shared_ptr<const StepProgram> program;  ///< has the events' names

  std::string_view name_of(const SimTraceEvent& event) const;
};

/// Ranks of one iteration under one policy, up to the exchange of gradients.
struct TracedIteration {
  int64_t iteration = 0;
  double imbalance = 1;  ///< of the hottest rank of all replicas
  int64_t hottest_rank = 0;
  int64_t end_ns = 0;  ///< of the slowest replica that was looked at
  bool died = false;
  std::vector<TracedRank> ranks;
};

/// What runs a policy; stand-ins in tests.
struct Simulator {
  std::function<SimRun(const Scenario&, const SimPolicy&, const SimOptions&)> run;
  /// Ranks by number, in this order. Empty: of the hottest rank's replica the heaviest rank of
  /// every pipeline rank, in order, and behind them the hottest.
  std::function<TracedIteration(const Scenario&, const SimPolicy&, const SimOptions&,
                                int64_t iteration, const std::vector<int64_t>& ranks)>
      trace;
};
/// simulate_job() and ReplicaTracer.
Simulator make_simulator();

/// The most uneven iteration of a run's series, the first of equals; -1: there is none.
int64_t spike_of(const SimRun& run);

}  // namespace bagualu
