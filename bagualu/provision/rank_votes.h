// Votes of an expert group whose ranks are threads of one process: simulations, real runs decided
// again, tests. Ranks that are processes vote over the communicator.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>

namespace bagualu {

/// What the ranks agree on depends on nothing but what they say. Thread-safe.
class RankVotes {
 public:
  explicit RankVotes(size_t ranks) : ranks_(ranks) {}

  /// True if all ranks that have not left say so; waits for them.
  /// Throws: InternalError once a rank failed.
  bool agree(bool mine);
  /// This rank votes no more: its step is over, or it died.
  void leave();
  /// This rank cannot go on: the others stop waiting for it.
  void fail();

 private:
  void conclude();

  size_t ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t arrived_ = 0;
  int64_t round_ = 0;
  bool all_ = true, result_ = true, failed_ = false;
};

/// Calls rank(0), rank(1), ... side by side, each on a thread of its own (the first one on the
/// caller's), and waits for all of them. Who returns has left the votes.
/// Throws: what the rank threw that failed first.
void drive_ranks(size_t ranks, RankVotes& votes, const std::function<void(size_t)>& rank);

}  // namespace bagualu
