#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace bagualu {

/// A communication failed: some peer is gone. The text names the action, the group and its ranks,
/// then what the backend said; who is gone is found out by the launcher's heartbeats.
class PeerLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// When things happened, on the steady clock; 0 = not known (yet).
struct CommTimes {
  int64_t issued_ns = 0;
  /// The data was in place, the emulated delay included. Of a send or receive: its wait returned,
  /// the data may have been there earlier.
  int64_t done_ns = 0;
  int64_t wait_begin_ns = 0;
  int64_t waited_until_ns = 0;
  int64_t size_bytes = 0;  ///< the larger of sent and received
  /// The group, if this is a collective, and its number among the group's: equal on all members.
  std::string channel;
  int64_t sequence = 0;
};

/// A communication that was issued, until it is known to have ended.
/// Invariants: its tensors' memory is in use while pending().
/// Threads: one at a time. Move-only; the communicator that issued it outlives it.
/// On a device with streams wait() makes the current stream wait and returns at once, and the
/// backend watches the deadline; on the CPU it blocks. The GPU side has not been run.
class PendingComm {
 public:
  /// Nothing was issued.
  PendingComm();
  PendingComm(PendingComm&&) noexcept;
  PendingComm& operator=(PendingComm&&) noexcept;
  /// As abandon().
  ~PendingComm();

  bool pending() const;
  /// "all-to-all of layer2.dispatch, group ep, with rank 1". Requires: something was issued.
  const std::string& label() const;
  const CommTimes& times() const;

  /// Whether wait() would return, or throw PeerLost, at once; never blocks. Sends and receives of
  /// gloo say so only while somebody waits, so for them this is false until then.
  bool query() const;

  /// Returns when the data is in place and the sources may be reused; sleeps through an emulated
  /// delay. Nothing if it is not pending.
  /// Throws: PeerLost, it is then no longer pending; DeadlineExceeded after the communicator's
  ///         deadline (by default) with the action, the group, its ranks and the time: it still is.
  void wait();
  void wait(int64_t timeout_ns);

  /// Gives up on the result: returns when the backend has let go of the memory. For a collective
  /// that is its end, at the latest by the backend's own timeout; a send or receive is withdrawn,
  /// after which its group can no longer be used, since the peer does not know.
  void abandon() noexcept;

 private:
  friend class Communicator;
  struct State;
  explicit PendingComm(std::unique_ptr<State> state);
  void wait_for_backend(int64_t timeout_ns);

  std::unique_ptr<State> state_;
};

}  // namespace bagualu
