#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <cstdint>

#include "bagualu/runtime/budget_counter.h"

namespace bagualu {

/// An allocation that our own limit refused (the machine may well have memory left). Derives from
/// torch's out-of-memory error, so ATen, autograd and Python (torch.OutOfMemoryError) treat it as
/// one.
class OverBudget : public c10::OutOfMemoryError {
 public:
  explicit OverBudget(const BudgetRefusal& refusal);

  int64_t wanted_bytes() const { return refusal_.wanted_bytes; }
  int64_t left_bytes() const { return refusal_.left_bytes; }
  int64_t budget_bytes() const { return refusal_.budget_bytes; }

 private:
  BudgetRefusal refusal_;
};

/// Memory of the device (here: the CPU allocator of torch) under a hard budget: every tensor byte
/// of the process counts, whoever allocates it. On CUDA the per-process limit of torch's caching
/// allocator plays this part; nothing of this class is used there.
///
/// A block carries its size in a header in front of it, so that the data pointer is its own context
/// (torch's raw allocation interface needs that), no table is locked, and whatever torch does with
/// the DataPtr (resize_, set_data_ptr, a swapped deleter) ends in the right release.
///
/// Ensures: blocks made before install() keep their own deleter and are never counted.
/// Threads: all members from any thread, but install() before other threads allocate.
/// Owns:    itself for the whole process: blocks may be freed at any time, so it is never removed.
/// Cost:    some tens of ns per block over the allocator it wraps.
/// Not counted: memory that bypasses torch's CPU allocator (numpy, shared memory, mapped files,
///          torch.UntypedStorage(n)) and scratch that kernels take from malloc.
class DeviceArena final : public c10::Allocator {
 public:
  /// Puts the arena in front of torch's present CPU allocator. Later calls only set the budget.
  /// Requires: budget_bytes >= 0; BudgetCounter::kNoBudget = count without a limit.
  static DeviceArena& install(int64_t budget_bytes);

  /// Returns: nullptr before install().
  static DeviceArena* installed();

  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

  int64_t live_bytes() const { return counter_.live_bytes(); }
  int64_t peak_bytes() const { return counter_.peak_bytes(); }
  int64_t budget_bytes() const { return counter_.budget_bytes(); }
  void set_budget(int64_t budget_bytes) { counter_.set_budget(budget_bytes); }

  /// From now on peak_bytes() is the peak since this call. Marks do not nest.
  void mark_peak() { counter_.mark_peak(); }
  void reset_peak() { counter_.mark_peak(); }

  /// Whether the bytes of `tensor` are counted here (an empty tensor has none: true).
  bool counts(const at::Tensor& tensor) const;

  /// Throws: OverBudget; whatever the wrapped allocator throws, with nothing counted.
  c10::DataPtr allocate(size_t block_bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* dst, const void* src, size_t count) const override;

 private:
  explicit DeviceArena(c10::Allocator& inner) : inner_(inner) {}
  ~DeviceArena() override = default;

  c10::Allocator& inner_;
  BudgetCounter counter_;
};

}  // namespace bagualu
