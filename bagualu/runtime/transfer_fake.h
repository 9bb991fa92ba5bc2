#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>

#include "bagualu/runtime/transfer.h"

namespace bagualu {

struct FakeTransferOptions {
  uint64_t seed = 1;
  /// Each copy takes a random time up to this, on the fake's own clock.
  int64_t max_delay_ns = 1'000'000;
};

/// Engine for tests, as hostile as the contract allows: time moves only in wait() and advance(),
/// the directions overtake each other at random, the destination is overwritten at issue, and the
/// source is read only at the end. So memory freed or reused too early shows as wrong bytes.
/// Cost: the copies run in the thread that waits.
class FakeTransferEngine final : public TransferEngine {
 public:
  explicit FakeTransferEngine(FakeTransferOptions options = {});
  ~FakeTransferEngine() override;

  CopyTicket copy(Direction direction, void* dst, const void* src, int64_t size_bytes,
                  CopyTicket after, std::string label) override;
  /// Throws: InternalError when the copy can never end (stalled, and no timeout).
  void wait(CopyTicket ticket, int64_t timeout_ns) override;
  bool query(CopyTicket ticket) override;
  void cancel(CopyTicket ticket) noexcept override;
  TransferStats stats() const override;

  /// Moves the clock and ends what ends in that time.
  void advance(int64_t ns);
  int64_t now_ns() const;
  /// While stalled a direction ends nothing but cancelled copies.
  void stall(Direction direction, bool stalled);
  /// The copy issued next in this direction fails with `cause`.
  void fail_next(Direction direction, std::string cause);

 private:
  struct Job {
    uint64_t sequence;
    void* dst;
    const void* src;
    int64_t size_bytes;
    CopyTicket after;
    std::string label;
    int64_t left_ns;
    int64_t issued_ns;
    std::optional<std::string> failure;
  };
  struct Lane {
    std::deque<Job> queue;
    uint64_t issued = 0;
    uint64_t ended = 0;
    int64_t last_end_ns = 0;
    std::map<uint64_t, std::string> failures;
    std::optional<std::string> next_failure;
    bool stalled = false;
  };

  Lane& lane(Direction direction) { return lanes_[static_cast<size_t>(direction)]; }
  bool has_ended(CopyTicket ticket) { return ticket.sequence <= lane(ticket.direction).ended; }
  void check_issued(CopyTicket ticket);
  bool can_run(Direction direction);
  /// Ends one random copy that ends by `deadline_ns`; false when none does (clock = deadline).
  bool step(int64_t deadline_ns);
  void end_front(Direction direction);

  FakeTransferOptions options_;
  mutable std::mutex mutex_;
  std::mt19937_64 random_;
  std::array<Lane, kDirections> lanes_;
  TransferStats stats_;
  int64_t now_ns_ = 0;
};

}  // namespace bagualu
