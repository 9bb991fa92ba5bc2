#include "bagualu/runtime/host_arena.h"

#include <fmt/core.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <list>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"

namespace bagualu {
namespace {

constexpr int64_t kPageBytes = 4 * kKiB;
// The machine is asked again after this much memory was taken: asking costs some tens of us.
constexpr int64_t kAskAgainBytes = 64 * kMiB;

void* take_from_system(int64_t charged) {
  const auto size = static_cast<size_t>(charged);
  if (charged < HostArena::kLargeBytes) {
    return std::aligned_alloc(kStorageGranularityBytes, size);
  }
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return data == MAP_FAILED ? nullptr : data;
}

void give_to_system(void* data, int64_t charged) noexcept {
  if (charged < HostArena::kLargeBytes) {
    std::free(data);
  } else {
    munmap(data, static_cast<size_t>(charged));
  }
}

}  // namespace

namespace detail {

/// Shared by the arena and its blocks, so that either may go first.
class HostArenaState {
 public:
  explicit HostArenaState(HostArenaOptions options) : options_(std::move(options)) {
    BGL_CHECK(options_.limit_bytes >= 0, options_.limit_bytes);
    BGL_CHECK(options_.keep_free_bytes >= 0, options_.keep_free_bytes);
  }
  ~HostArenaState() { trim_to(0); }

  Result<void*, HostFull> take(int64_t charged) {
    const std::lock_guard lock(mutex_);
    if (options_.limit_bytes > 0 && charged > options_.limit_bytes - live_bytes_) {
      return HostFull{HostFull::Reason::kLimit, charged,
                      std::max<int64_t>(0, options_.limit_bytes - live_bytes_)};
    }
    void* data = reuse(charged);
    if (data == nullptr) {
      trim_to(keep_ceiling(live_bytes_ + charged));
      if (const auto full = ask_machine(charged)) {
        return *full;
      }
      data = take_from_system(charged);
      if (data == nullptr) {
        return HostFull{HostFull::Reason::kSystem, charged, 0};
      }
    }
    live_bytes_ += charged;
    peak_bytes_ = std::max(peak_bytes_, live_bytes_);
    most_live_bytes_ = std::max(most_live_bytes_, live_bytes_);
    return data;
  }

  void give(void* data, int64_t charged) noexcept {
    const std::lock_guard lock(mutex_);
    live_bytes_ -= charged;
    try {
      keep(data, charged);
    } catch (const std::bad_alloc&) {
      give_to_system(data, charged);
    }
    trim_to(keep_ceiling(live_bytes_));
  }

  void trim() {
    const std::lock_guard lock(mutex_);
    trim_to(0);
  }

  void set_limit(int64_t limit_bytes) {
    BGL_CHECK(limit_bytes >= 0, limit_bytes);
    const std::lock_guard lock(mutex_);
    options_.limit_bytes = limit_bytes;
    trim_to(keep_ceiling(live_bytes_));
  }

  void reset_peak() {
    const std::lock_guard lock(mutex_);
    peak_bytes_ = live_bytes_;
  }

  int64_t live_bytes() const { return locked(live_bytes_); }
  int64_t peak_bytes() const { return locked(peak_bytes_); }
  int64_t kept_bytes() const { return locked(kept_bytes_); }
  int64_t limit_bytes() const { return locked(options_.limit_bytes); }

 private:
  struct Kept {
    void* data;
    int64_t charged;
  };
  using KeptList = std::list<Kept>;

  int64_t locked(const int64_t& member) const {
    const std::lock_guard lock(mutex_);
    return member;
  }

  /// Most bytes that may be kept beside so many live ones: live and kept together respect the
  /// limit, and what was ever live at once. Sizes follow the routing, so that without the latter
  /// ever more blocks of sizes that do not come again would be kept.
  int64_t keep_ceiling(int64_t live_bytes) const {
    int64_t most = most_live_bytes_;
    if (options_.limit_bytes > 0) most = std::min(most, options_.limit_bytes);
    return std::clamp<int64_t>(most - live_bytes, 0, options_.keep_free_bytes);
  }

  void keep(void* data, int64_t charged) {
    const auto position = kept_.insert(kept_.end(), Kept{data, charged});
    try {
      kept_by_size_.emplace(charged, position);
    } catch (...) {
      kept_.erase(position);
      throw;
    }
    kept_bytes_ += charged;
  }

  void* reuse(int64_t charged) {
    // The newest of the size: its pages are the likeliest to be in the cache.
    auto after = kept_by_size_.upper_bound(charged);
    if (after == kept_by_size_.begin() || std::prev(after)->first != charged) {
      return nullptr;
    }
    const auto found = std::prev(after);
    void* data = found->second->data;
    kept_.erase(found->second);
    kept_by_size_.erase(found);
    kept_bytes_ -= charged;
    return data;
  }

  void trim_to(int64_t ceiling) noexcept {
    while (kept_bytes_ > ceiling) {
      const auto oldest = kept_.begin();
      // Blocks of one size stand in order of age, so the first is this one.
      kept_by_size_.erase(kept_by_size_.lower_bound(oldest->charged));
      give_to_system(oldest->data, oldest->charged);
      kept_bytes_ -= oldest->charged;
      kept_.erase(oldest);
    }
  }

  std::optional<HostFull> ask_machine(int64_t charged) {
    if (!options_.available_bytes) {
      return std::nullopt;
    }
    if (charged > machine_left_bytes_) {
      const int64_t available = options_.available_bytes();
      if (charged > available) {
        machine_left_bytes_ = 0;
        return HostFull{HostFull::Reason::kSystem, charged, std::max<int64_t>(0, available)};
      }
      machine_left_bytes_ = std::min(available, std::max(charged, kAskAgainBytes));
    }
    machine_left_bytes_ -= charged;
    return std::nullopt;
  }

  mutable std::mutex mutex_;
  HostArenaOptions options_;
  int64_t live_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t most_live_bytes_ = 0;  ///< as peak_bytes_, never reset
  int64_t kept_bytes_ = 0;
  /// What may be taken before the machine is asked again.
  int64_t machine_left_bytes_ = 0;
  KeptList kept_;  // oldest first
  std::multimap<int64_t, KeptList::iterator> kept_by_size_;
};

}  // namespace detail

std::string HostFull::to_string() const {
  return fmt::format("host memory full ({}): wanted {} ({} B), left {} ({} B)",
                     reason == Reason::kLimit ? "our limit" : "the machine or its memory group",
                     format_bytes(wanted_bytes), wanted_bytes, format_bytes(left_bytes),
                     left_bytes);
}

HostBlock::HostBlock(std::shared_ptr<detail::HostArenaState> state, void* data, int64_t size_bytes)
    : state_(std::move(state)), data_(data), size_bytes_(size_bytes) {}

HostBlock::HostBlock(HostBlock&& other) noexcept
    : state_(std::move(other.state_)),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

HostBlock& HostBlock::operator=(HostBlock&& other) noexcept {
  if (this != &other) {
    reset();
    state_ = std::move(other.state_);
    data_ = std::exchange(other.data_, nullptr);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
  }
  return *this;
}

void HostBlock::reset() noexcept {
  if (data_ != nullptr) {
    state_->give(data_, HostArena::charged_bytes(size_bytes_));
  }
  data_ = nullptr;
  size_bytes_ = 0;
  state_.reset();
}

int64_t HostArena::charged_bytes(int64_t block_bytes) {
  const int64_t granules = round_up(block_bytes, kStorageGranularityBytes);
  return granules < kLargeBytes ? granules : round_up(granules, kPageBytes);
}

HostArena::HostArena(HostArenaOptions options)
    : state_(std::make_shared<detail::HostArenaState>(std::move(options))) {}

Result<HostBlock, HostFull> HostArena::alloc(int64_t block_bytes) {
  BGL_CHECK(block_bytes >= 0 && block_bytes < std::numeric_limits<int64_t>::max() / 2, block_bytes);
  if (block_bytes == 0) {
    return HostBlock();
  }
  const auto taken = state_->take(charged_bytes(block_bytes));
  if (!taken.ok()) {
    return taken.error();
  }
  return HostBlock(state_, taken.value(), block_bytes);
}

int64_t HostArena::live_bytes() const { return state_->live_bytes(); }
int64_t HostArena::peak_bytes() const { return state_->peak_bytes(); }
int64_t HostArena::limit_bytes() const { return state_->limit_bytes(); }
int64_t HostArena::kept_bytes() const { return state_->kept_bytes(); }
void HostArena::set_limit(int64_t limit_bytes) { state_->set_limit(limit_bytes); }
void HostArena::reset_peak() { state_->reset_peak(); }
void HostArena::trim() { state_->trim(); }

}  // namespace bagualu
