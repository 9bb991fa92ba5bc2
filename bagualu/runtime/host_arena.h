#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "bagualu/base/result.h"

namespace bagualu {

/// Bytes that this process can still touch before the kernel kills it: the least of free system
/// memory and what each memory cgroup above us (v2 or v1) leaves. Reclaimable page cache is free.
/// Requires: `root` holds proc/ and sys/fs/cgroup/ ("/" outside tests).
/// Returns:  INT64_MAX when nothing there can be read.
/// Cost:     reads about five small files; some tens of us.
int64_t available_host_bytes(const std::filesystem::path& root = "/");

struct HostArenaOptions {
  /// Live bytes never exceed this. 0 = only the machine limits.
  int64_t limit_bytes = 0;
  /// Freed blocks kept for reuse, together at most this much, and with the live ones never more
  /// than were once live together; the oldest go back to the system first. More saves page faults,
  /// less leaves memory to others.
  int64_t keep_free_bytes = int64_t{256} << 20;
  /// Asked before memory is taken from the system, so that we are refused instead of killed.
  std::function<int64_t()> available_bytes = [] { return available_host_bytes(); };
};

/// Why the host could not give a block.
struct HostFull {
  enum class Reason { kLimit, kSystem };
  Reason reason;
  int64_t wanted_bytes;
  int64_t left_bytes;

  std::string to_string() const;
};

namespace detail {
class HostArenaState;
}

/// One block of host memory; gives it back when destroyed. May outlive its arena.
class HostBlock {
 public:
  HostBlock() = default;
  HostBlock(HostBlock&& other) noexcept;
  HostBlock& operator=(HostBlock&& other) noexcept;
  ~HostBlock() { reset(); }

  /// 64-byte aligned, page aligned from HostArena::kLargeBytes on; nullptr for zero bytes.
  void* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }
  void reset() noexcept;

 private:
  friend class HostArena;
  HostBlock(std::shared_ptr<detail::HostArenaState> state, void* data, int64_t size_bytes);

  std::shared_ptr<detail::HostArenaState> state_;
  void* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

/// Host memory for offloaded storages: exact sizes (never rounded to a power of two), a hard limit,
/// freed blocks reused by exact size.
/// Ensures: live + kept bytes <= limit and <= the most that were ever live; a refusal leaves everything unchanged.
/// Threads: all members from any thread.
/// Cost:    one lock and two map look-ups per block when a freed one fits, else a mapping.
class HostArena {
 public:
  /// From this size on a block is its own mapping, else it comes from the heap.
  static constexpr int64_t kLargeBytes = int64_t{64} << 10;

  /// What a block counts: rounded up to 64 bytes, or to whole pages from kLargeBytes on.
  static int64_t charged_bytes(int64_t block_bytes);

  explicit HostArena(HostArenaOptions options = {});
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  /// Zero bytes are legal and count nothing. Contents are undefined.
  Result<HostBlock, HostFull> alloc(int64_t block_bytes);

  int64_t live_bytes() const;
  int64_t peak_bytes() const;
  int64_t limit_bytes() const;
  /// Freed blocks held for reuse; not part of live_bytes().
  int64_t kept_bytes() const;
  void set_limit(int64_t limit_bytes);
  void reset_peak();
  /// Gives every kept block back to the system.
  void trim();

 private:
  std::shared_ptr<detail::HostArenaState> state_;
};

}  // namespace bagualu
