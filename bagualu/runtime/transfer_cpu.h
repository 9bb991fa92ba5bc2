#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "bagualu/runtime/transfer.h"

namespace bagualu {

struct CpuTransferOptions {
  /// Most bytes moved between two looks at cancel(). Less reacts sooner, more costs less.
  int64_t chunk_bytes = int64_t{4} << 20;
  /// Moves one chunk (dst, src, bytes); memcpy when empty. An exception fails the copy.
  std::function<void(void*, const void*, size_t)> copy_chunk;
};

/// Engine of a CPU rank: one worker thread per direction.
/// Cost: one lock and one wake-up per copy.
class CpuTransferEngine final : public TransferEngine {
 public:
  explicit CpuTransferEngine(CpuTransferOptions options = {});
  ~CpuTransferEngine() override;

  CopyTicket copy(Direction direction, void* dst, const void* src, int64_t size_bytes,
                  CopyTicket after, std::string label) override;
  void wait(CopyTicket ticket, int64_t timeout_ns) override;
  bool query(CopyTicket ticket) override;
  void cancel(CopyTicket ticket) noexcept override;
  TransferStats stats() const override;

 private:
  struct Job {
    uint64_t sequence;
    void* dst;
    const void* src;
    int64_t size_bytes;
    CopyTicket after;
    std::string label;
    bool cancelled;
    int64_t issued_ns;
    int64_t begin_ns;
  };
  /// One direction. A job stays at the front of the queue while it runs.
  struct Lane {
    std::deque<Job> queue;
    uint64_t issued = 0;
    uint64_t ended = 0;
    std::map<uint64_t, std::string> failures;
    std::condition_variable work;
    std::thread worker;
  };

  Lane& lane(Direction direction) { return lanes_[static_cast<size_t>(direction)]; }
  void work(Direction direction);
  /// Runs the job; returns its failure, empty for success.
  std::string run(Direction direction, Job& job, std::unique_lock<std::mutex>& lock);
  void move_bytes(const Job& job);
  bool is_cancelled(const Job& job) const;
  bool has_ended(CopyTicket ticket);
  const std::string* failure(CopyTicket ticket);
  void check_issued(CopyTicket ticket);

  CpuTransferOptions options_;
  /// Guards everything below.
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  std::array<Lane, kDirections> lanes_;
  TransferStats stats_;
  bool stopping_ = false;
};

}  // namespace bagualu
