#include "bagualu/runtime/budget_counter.h"

#include <algorithm>
#include <limits>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"

namespace bagualu {

int64_t BudgetCounter::charged_bytes(int64_t block_bytes) {
  return round_up(block_bytes, kStorageGranularityBytes);
}

BudgetCounter::BudgetCounter(int64_t budget_bytes) : budget_bytes_(budget_bytes) {
  BGL_CHECK(budget_bytes >= 0, budget_bytes);
}

std::optional<BudgetRefusal> BudgetCounter::reserve(int64_t charged) {
  int64_t live = live_bytes_.load(std::memory_order_relaxed);
  int64_t wanted_live = 0;
  // A loop instead of add-then-undo: the undo would for a moment show bytes that nobody got, and
  // refuse another thread that fits.
  do {
    const int64_t budget = budget_bytes_.load(std::memory_order_relaxed);
    const int64_t ceiling = budget == kNoBudget ? std::numeric_limits<int64_t>::max() : budget;
    if (charged > ceiling - live) {
      return BudgetRefusal{charged, std::max<int64_t>(0, ceiling - live), budget};
    }
    wanted_live = live + charged;
  } while (!live_bytes_.compare_exchange_weak(live, wanted_live, std::memory_order_acq_rel,
                                              std::memory_order_relaxed));
  int64_t peak = peak_bytes_.load(std::memory_order_relaxed);
  while (peak < wanted_live &&
         !peak_bytes_.compare_exchange_weak(peak, wanted_live, std::memory_order_acq_rel,
                                            std::memory_order_relaxed)) {
  }
  return std::nullopt;
}

void BudgetCounter::release(int64_t charged) {
  live_bytes_.fetch_sub(charged, std::memory_order_acq_rel);
}

void BudgetCounter::set_budget(int64_t budget_bytes) {
  BGL_CHECK(budget_bytes >= 0, budget_bytes);
  budget_bytes_.store(budget_bytes, std::memory_order_release);
}

void BudgetCounter::mark_peak() {
  peak_bytes_.store(live_bytes_.load(std::memory_order_acquire), std::memory_order_release);
}

}  // namespace bagualu
