// Wall clock of a job: what iterations, checkpoints, deaths and failures add up to. Knows nothing
// of ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "bagualu/sim/scenario.h"

namespace bagualu {

/// Invariant: wall_ns = useful_ns + lost_ns + restart_ns + checkpoint_ns, to the nanosecond.
struct JobTotals {
  int64_t wall_ns = 0;
  int64_t useful_ns = 0;  ///< of completed iterations, each once
  int64_t lost_ns = 0;    ///< cut short, or done again after a restart
  int64_t restart_ns = 0;
  int64_t checkpoint_ns = 0;    ///< of checkpoints that were finished
  int64_t completed = 0;        ///< iterations, each once
  int64_t lost_iterations = 0;  ///< completed ones that were done again
  int64_t ooms = 0;
  int64_t failures = 0;
};

/// A job goes back to its last checkpoint after a death or a failure and does again what it had
/// completed since, in the same time. A checkpoint is taken behind every `checkpoint_interval`
/// completed iterations. Failures come at exponentially distributed gaps of the time in which the
/// job runs (iterations and checkpoints, repeated ones included, restarts not).
/// Memory: one time per iteration since the last checkpoint.
class JobClock {
 public:
  /// Throws: InvalidInput for an interval below 1, negative times or rates.
  JobClock(const Interruptions& interruptions, uint64_t seed);

  /// The next iteration takes `ns` and succeeds.
  /// Throws: InvalidInput if failures are so frequent that no checkpoint is ever reached.
  void complete(int64_t ns);
  /// A rank runs out of memory `ns` into the next iteration, which stays the next one.
  void die(int64_t ns);

  const JobTotals& totals() const { return totals_; }

 private:
  bool survives(int64_t ns);
  void restart();
  void draw_failure();

  const Interruptions interruptions_;
  const uint64_t seed_;
  const int64_t restart_ns_;
  const int64_t checkpoint_ns_;
  JobTotals totals_;
  std::vector<int64_t> since_checkpoint_ns_;
  int64_t until_failure_ns_ = 0;
  int64_t failures_since_checkpoint_ = 0;
};

/// Whether entry `i` of `total` is one of at most `limit` evenly spread ones; the first always is.
bool is_kept(int64_t i, int64_t total, int64_t limit);

}  // namespace bagualu
