#include "bagualu/runtime/device_arena.h"

#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <fmt/core.h>

#include <limits>
#include <new>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"

namespace bagualu {
namespace {

DeviceArena* g_installed = nullptr;

/// Sits in front of every counted block. Exactly one granule, so the block keeps the alignment of
/// the wrapped allocator.
struct alignas(kStorageGranularityBytes) BlockHeader {
  BudgetCounter* counter;
  int64_t charged_bytes;
  void* inner_context;
  c10::DeleterFnPtr inner_deleter;
};
static_assert(sizeof(BlockHeader) == kStorageGranularityBytes);

void free_block(void* data) {
  if (data == nullptr) {
    return;
  }
  const BlockHeader header = *(static_cast<BlockHeader*>(data) - 1);
  header.inner_deleter(header.inner_context);
  // Only now: the budget must never promise memory that the inner allocator still holds.
  header.counter->release(header.charged_bytes);
}

std::string refusal_text(const BudgetRefusal& refusal) {
  return fmt::format("out of the device budget: wanted {} ({} B), left {} ({} B) of {} ({} B)",
                     format_bytes(refusal.wanted_bytes), refusal.wanted_bytes,
                     format_bytes(refusal.left_bytes), refusal.left_bytes,
                     format_bytes(refusal.budget_bytes), refusal.budget_bytes);
}

}  // namespace

OverBudget::OverBudget(const BudgetRefusal& refusal)
    : c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                            refusal_text(refusal)),
      refusal_(refusal) {}

DeviceArena& DeviceArena::install(int64_t budget_bytes) {
  BGL_CHECK(budget_bytes >= 0, budget_bytes);
  if (g_installed == nullptr) {
    // Never deleted: blocks and their deleter pointers may outlive every static object.
    auto* arena = new DeviceArena(*c10::GetCPUAllocator());
    constexpr uint8_t kHighestPriority = std::numeric_limits<uint8_t>::max();
    c10::SetCPUAllocator(arena, kHighestPriority);
    BGL_CHECK(c10::GetCPUAllocator() == arena);
    g_installed = arena;
  }
  g_installed->set_budget(budget_bytes);
  return *g_installed;
}

DeviceArena* DeviceArena::installed() { return g_installed; }

bool DeviceArena::counts(const at::Tensor& tensor) const {
  const c10::DataPtr& data = tensor.storage().data_ptr();
  return data.get() == nullptr || data.get_deleter() == &free_block;
}

c10::DataPtr DeviceArena::allocate(size_t block_bytes) {
  const c10::Device cpu(c10::DeviceType::CPU);
  if (block_bytes == 0) {
    return {nullptr, nullptr, &free_block, cpu};
  }
  constexpr auto kLargest = static_cast<size_t>(std::numeric_limits<int64_t>::max() / 2);
  TORCH_CHECK(block_bytes < kLargest, "DeviceArena: ", block_bytes, " bytes asked for");
  const int64_t charged = BudgetCounter::charged_bytes(static_cast<int64_t>(block_bytes));
  if (const auto refusal = counter_.reserve(charged)) {
    throw OverBudget(*refusal);
  }
  try {
    c10::DataPtr inner = inner_.allocate(block_bytes + sizeof(BlockHeader));
    auto* header = static_cast<BlockHeader*>(inner.get());
    const c10::DeleterFnPtr inner_deleter = inner.get_deleter();
    header = new (header) BlockHeader{&counter_, charged, nullptr, inner_deleter};
    header->inner_context = inner.release_context();
    void* data = header + 1;
    return {data, data, &free_block, cpu};
  } catch (...) {
    counter_.release(charged);
    throw;
  }
}

c10::DeleterFnPtr DeviceArena::raw_deleter() const { return &free_block; }

void DeviceArena::copy_data(void* dst, const void* src, size_t count) const {
  default_copy_data(dst, src, count);
}

}  // namespace bagualu
