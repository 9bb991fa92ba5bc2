#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bagualu/sim/engine.h"
#include "bagualu/sim/run_replay.h"

namespace bagualu {

/// Rates of what ranks send to each other, from a run's profile: an exchange's time is taken as a
/// fixed part and one that follows its bytes, through the profile's times of dispatch and combine
/// at even rows and at most rows. Messages between stages take the same way through the machine. An
/// emulated slow link has its own, stated.
SimLinks run_links(const LoggedStart& start, const RunReplay& replay);

/// Simulated time of a run's steps.
/// Requires: start outlives it.
class RunTiming {
 public:
  RunTiming(const SimLinks& links, const LoggedStart& start) : start_(start), engine_(links) {}

  /// From the step's begin until the last rank's last pass. Requires: programs were asked for.
  int64_t passes_ns(const ReplayedStep& simulated, const LoggedStep& logged);

 private:
  const LoggedStart& start_;
  SimEngine engine_;
};

}  // namespace bagualu
