#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace bagualu {

/// Why a reservation was refused. `left_bytes` is what the budget still held at that moment.
struct BudgetRefusal {
  int64_t wanted_bytes;
  int64_t left_bytes;
  int64_t budget_bytes;
};

/// Counts live and peak bytes under a hard budget; knows nothing of any allocator.
/// Ensures: live_bytes() never exceeds the budget that held when the bytes were reserved;
///          peak_bytes() is the exact maximum of live_bytes() since the last mark_peak().
/// Threads: all members may be called from any thread. mark_peak() is exact only while no other
///          thread reserves.
/// Cost:    two uncontended atomic updates per reserve, one per release.
class BudgetCounter {
 public:
  static constexpr int64_t kNoBudget = 0;

  /// What a block of `block_bytes` counts: rounded up to kStorageGranularityBytes, 0 for 0.
  static int64_t charged_bytes(int64_t block_bytes);

  explicit BudgetCounter(int64_t budget_bytes = kNoBudget);
  BudgetCounter(const BudgetCounter&) = delete;
  BudgetCounter& operator=(const BudgetCounter&) = delete;

  /// Takes `charged` bytes out of the budget, or nothing.
  /// Returns: nullopt when taken; the caller must release() them when its allocation then fails.
  std::optional<BudgetRefusal> reserve(int64_t charged);
  void release(int64_t charged);

  /// kNoBudget lifts the limit. A budget below the live bytes is legal: it refuses every further
  /// reservation until enough is released.
  void set_budget(int64_t budget_bytes);

  /// Starts a new peak measurement: peak = live. Marks do not nest.
  void mark_peak();

  int64_t live_bytes() const { return live_bytes_.load(std::memory_order_acquire); }
  int64_t peak_bytes() const { return peak_bytes_.load(std::memory_order_acquire); }
  int64_t budget_bytes() const { return budget_bytes_.load(std::memory_order_acquire); }

 private:
  std::atomic<int64_t> live_bytes_{0};
  std::atomic<int64_t> peak_bytes_{0};
  std::atomic<int64_t> budget_bytes_;
};

}  // namespace bagualu
