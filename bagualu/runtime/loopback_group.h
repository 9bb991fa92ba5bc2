#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace bagualu {

struct LoopbackOptions {
  uint64_t seed = 1;
  /// Every transfer takes a random time up to this, and ends at each rank at a time of its own.
  int64_t max_delay_ns = 200'000;
};

/// Process group for tests whose ranks are threads of one process. As hostile as the contract
/// allows: receive buffers are overwritten at issue, sources are read late, transfers overtake each
/// other at random. So memory read, freed or reused too early shows as wrong bytes.
/// Threads: any. Owns: a thread that moves the bytes.
class LoopbackGroup {
 public:
  /// Registers one process group per rank with c10d, until the destructor.
  /// `name` is unique in the process.
  LoopbackGroup(const std::string& name, int64_t size, LoopbackOptions options = {});
  ~LoopbackGroup();
  LoopbackGroup(const LoopbackGroup&) = delete;
  LoopbackGroup& operator=(const LoopbackGroup&) = delete;

  /// What Communicator takes for this rank.
  std::string name_of(int64_t rank) const;

  /// While stalled nothing ends.
  void stall(bool stalled);
  /// All that this rank has not completed fails at its peers, and all that they issue with it.
  void kill(int64_t rank);
  /// The collective that completes next fails on every rank.
  void fail_next(const std::string& cause);
  /// What was issued and has not ended, over all ranks; what has.
  int64_t unended() const;
  int64_t ended() const;

  class Fabric;

 private:
  std::string name_;
  int64_t size_;
  std::shared_ptr<Fabric> fabric_;
  struct Groups;
  std::unique_ptr<Groups> groups_;  ///< c10d itself keeps weak references only
};

}  // namespace bagualu
