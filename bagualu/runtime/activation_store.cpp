#include "bagualu/runtime/activation_store.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/cost/block_codes.h"
#include "bagualu/runtime/ops/quantise.h"

namespace bagualu {
namespace {

int64_t storage_bytes(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.storage().nbytes());
}

/// Multiply-and-rotate over words; order matters, so swapped words are seen.
uint64_t checksum(const void* data, int64_t size_bytes) {
  constexpr uint64_t kPrime = 0x9E37'79B9'7F4A'7C15;
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint64_t sum = static_cast<uint64_t>(size_bytes);
  for (int64_t at = 0; at < size_bytes; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, static_cast<size_t>(std::min<int64_t>(8, size_bytes - at)));
    sum = (sum ^ word) * kPrime;
    sum ^= sum >> 29;
  }
  return sum;
}

/// All that is needed to make an equal tensor again; offset is 0 for every stored one.
struct TensorLayout {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::TensorOptions options;
};

}  // namespace

HostOverLimit::HostOverLimit(const std::string& storage, const HostFull& full)
    : std::runtime_error(fmt::format("offload of {}: {}", storage, full.to_string())),
      full_(full) {}

struct ActivationStore::Entry {
  StorageRecord record;
  at::Tensor tensor;
  TensorLayout layout;
  int64_t size_bytes = 0;
  at::Tensor codes;
  HostBlock host;
  CopyTicket d2h;
  CopyTicket h2d;
  uint64_t checksum = 0;

  std::string dump() const {
    return fmt::format("{} sizes [{}] strides [{}] {} B", record.dump(),
                       fmt::join(layout.sizes, ","), fmt::join(layout.strides, ","), size_bytes);
  }
  [[noreturn]] void fail(const char* verb, const std::string& why) const {
    throw InternalError(fmt::format("{}: {}: {}", verb, why, dump()));
  }
  const void* device_data() const { return tensor.storage().data(); }
};

ActivationStore::ActivationStore(DeviceArena& device, HostArena& host, TransferEngine& engine,
                                 ActivationStoreOptions options)
    : device_(device), host_(host), engine_(engine), options_(options) {}

ActivationStore::~ActivationStore() { abort(); }

void ActivationStore::begin(int64_t step, int64_t microbatch, std::vector<StorageInfo> storages) {
  BGL_CHECK(!open_, step, microbatch, step_, microbatch_);
  entries_.reserve(storages.size());
  for (StorageInfo& info : storages) {
    entries_.push_back(
        {StorageRecord(step, microbatch, std::move(info)), {}, {}, 0, {}, {}, {}, {}, 0});
  }
  step_ = step;
  microbatch_ = microbatch;
  stats_ = {};
  host_discarded_bytes_ = 0;
  open_ = true;
}

void ActivationStore::put(int id, at::Tensor tensor) {
  adopt(id, std::move(tensor), StorageState::kLive, "put");
}

void ActivationStore::put_recomputed(int id, at::Tensor tensor) {
  adopt(id, std::move(tensor), StorageState::kRecomputed, "put_recomputed");
  stats_.bytes_recomputed += entries_[static_cast<size_t>(id)].size_bytes;
}

const at::Tensor& ActivationStore::get(int id) const {
  const Entry& from = entry(id, "get");
  if (!from.record.is_live()) {
    from.fail("get", "the storage is not live");
  }
  return from.tensor;
}

bool ActivationStore::is_live(int id) const { return entry(id, "is_live").record.is_live(); }

void ActivationStore::drop(int id) {
  Entry& from = entry(id, "drop");
  from.record.check_move(StorageState::kDropped, "drop");
  check_sole_owner(from, "drop");
  free_device(from);
  from.record.move(StorageState::kDropped, "drop");
}

void ActivationStore::release(int id) {
  Entry& from = entry(id, "release");
  from.record.check_move(StorageState::kReleased, "release");
  if (from.record.is_live()) {
    check_sole_owner(from, "release");
    free_device(from);
  } else {
    host_discarded_bytes_ += from.size_bytes;
    free_host(from);
  }
  from.record.move(StorageState::kReleased, "release");
}

void ActivationStore::offload(int id) {
  if (const auto full = try_offload(id)) {
    throw HostOverLimit(entry(id, "offload").record.key(), *full);
  }
}

std::optional<HostFull> ActivationStore::try_offload(int id) {
  Entry& from = entry(id, "offload");
  from.record.check_move(StorageState::kD2H, "offload");
  // A second holder could write into the source while the copy reads it.
  check_sole_owner(from, "offload");
  auto block = host_.alloc(from.size_bytes);
  if (!block.ok()) {
    return block.error();
  }
  if (options_.verify_checksums) {
    from.checksum = checksum(from.device_data(), from.size_bytes);
  }
  from.d2h = engine_.copy(Direction::kD2H, block.value().data(), from.device_data(),
                          from.size_bytes, {}, from.record.key());
  from.host = std::move(block.value());
  host_resident_bytes_ += from.size_bytes;
  stats_.bytes_offloaded += from.size_bytes;
  from.record.move(StorageState::kD2H, "offload");
  return std::nullopt;
}

void ActivationStore::drain(int id) {
  Entry& from = entry(id, "drain");
  from.record.check_move(StorageState::kHost, "drain");
  wait_for(from.d2h);
  check_sole_owner(from, "drain");
  if (options_.verify_checksums && checksum(from.device_data(), from.size_bytes) != from.checksum) {
    from.fail("drain", "the device bytes changed while they were copied to the host");
  }
  free_device(from);
  from.record.move(StorageState::kHost, "drain");
}

void ActivationStore::reload(int id) {
  Entry& from = entry(id, "reload");
  from.record.check_move(StorageState::kH2D, "reload");
  at::Tensor fresh = empty_like(from);
  // Always behind the copy out, even if a caller one day reloads what was not drained.
  from.h2d = engine_.copy(Direction::kH2D, fresh.storage().mutable_data(), from.host.data(),
                          from.size_bytes, from.d2h, from.record.key());
  from.tensor = std::move(fresh);
  device_resident_bytes_ += from.size_bytes;
  from.record.move(StorageState::kH2D, "reload", ++last_generation_);
}

void ActivationStore::await(int id) {
  Entry& from = entry(id, "await");
  // put is the other way to LIVE, so the table alone would let an empty storage through.
  if (from.record.state() != StorageState::kH2D) {
    from.fail("await", "no reload was issued");
  }
  wait_for(from.h2d);
  if (options_.verify_checksums && checksum(from.device_data(), from.size_bytes) != from.checksum) {
    from.fail("await", "the reloaded bytes differ from the offloaded ones");
  }
  free_host(from);
  stats_.bytes_reloaded += from.size_bytes;
  from.record.move(StorageState::kLive, "await");
}

void ActivationStore::encode(int id) {
  Entry& from = entry(id, "encode");
  from.record.check_move(StorageState::kEncoded, "encode");
  check_sole_owner(from, "encode");
  // Sized as the graph counts it: the codes of all the bytes that the arena charges.
  at::Tensor codes = at::empty({block_code_bytes(BudgetCounter::charged_bytes(from.size_bytes),
                                                 static_cast<int64_t>(from.tensor.element_size()))},
                               from.layout.options.dtype(at::kByte));
  ops::quantise_encode(from.tensor, codes);
  device_resident_bytes_ += storage_bytes(codes);
  stats_.bytes_encoded += from.size_bytes;
  from.codes = std::move(codes);
  free_device(from);
  from.record.move(StorageState::kEncoded, "encode");
}

void ActivationStore::decode(int id) {
  Entry& from = entry(id, "decode");
  // put is the other way to LIVE, so the table alone would let an empty storage through.
  if (from.record.state() != StorageState::kEncoded) {
    from.fail("decode", "the storage is not encoded");
  }
  at::Tensor fresh = empty_like(from);
  ops::quantise_decode(from.codes, fresh);
  device_resident_bytes_ += from.size_bytes - storage_bytes(from.codes);
  from.tensor = std::move(fresh);
  from.codes.reset();
  from.record.move(StorageState::kLive, "decode", ++last_generation_);
}

void ActivationStore::lend(int id) { entry(id, "lend").record.move(StorageState::kLent, "lend"); }

void ActivationStore::take_back(int id) {
  Entry& from = entry(id, "take_back");
  // put is the other way to LIVE, so the table alone would let an empty storage through.
  if (from.record.state() != StorageState::kLent) {
    from.fail("take_back", "the storage was not lent");
  }
  from.record.move(StorageState::kLive, "take_back");
}

std::pair<CopyTicket, int64_t> ActivationStore::last_copy(int id) const {
  const Entry& from = entry(id, "last_copy");
  return {from.h2d.is_none() ? from.d2h : from.h2d, from.size_bytes};
}

ActivationStoreStats ActivationStore::finish() {
  BGL_CHECK(open_, step_, microbatch_);
  for (const Entry& each : entries_) {
    const StorageState state = each.record.state();
    if (state != StorageState::kReleased && state != StorageState::kDropped &&
        state != StorageState::kEmpty) {
      each.fail("finish", "the storage is still held");
    }
    BGL_CHECK(engine_.query(each.d2h) && engine_.query(each.h2d), each.dump());
  }
  BGL_CHECK(device_resident_bytes_ == 0, device_resident_bytes_);
  BGL_CHECK(host_resident_bytes_ == 0, host_resident_bytes_);
  BGL_CHECK(stats_.bytes_offloaded == stats_.bytes_reloaded + host_discarded_bytes_,
            stats_.bytes_offloaded, stats_.bytes_reloaded, host_discarded_bytes_);
  close();
  return stats_;
}

void ActivationStore::abort() noexcept {
  for (const Entry& each : entries_) {
    engine_.cancel(each.d2h);
    engine_.cancel(each.h2d);
  }
  for (const Entry& each : entries_) {
    for (const CopyTicket ticket : {each.d2h, each.h2d}) {
      try {
        engine_.wait(ticket, TransferEngine::kNoTimeout);
      } catch (const TransferFailed&) {
        // The copy ended, which is all that freeing its memory needs.
      }
    }
  }
  close();
}

ActivationStore::Entry& ActivationStore::entry(int id, const char* verb) {
  return const_cast<Entry&>(std::as_const(*this).entry(id, verb));
}

const ActivationStore::Entry& ActivationStore::entry(int id, const char* verb) const {
  BGL_CHECK(open_, verb, id);
  BGL_CHECK(id >= 0 && static_cast<size_t>(id) < entries_.size(), verb, id, entries_.size());
  return entries_[static_cast<size_t>(id)];
}

void ActivationStore::adopt(int id, at::Tensor tensor, StorageState to, const char* verb) {
  Entry& into = entry(id, verb);
  into.record.check_move(to, verb);
  if (to == StorageState::kLive && into.record.state() != StorageState::kEmpty) {
    into.fail(verb, "the storage was put before");
  }
  check_whole_storage(into, tensor, verb);
  if (tensor.is_view()) {
    // A view made by an operator (x.t()) holds its base tensor for autograd, and with it the bytes.
    tensor = tensor.variable_data();
  }
  into.layout = {tensor.sizes().vec(), tensor.strides().vec(), tensor.options()};
  into.size_bytes = storage_bytes(tensor);
  into.tensor = std::move(tensor);
  into.d2h = {};
  into.h2d = {};
  device_resident_bytes_ += into.size_bytes;
  into.record.move(to, verb, ++last_generation_);
}

void ActivationStore::check_whole_storage(const Entry& entry, const at::Tensor& tensor,
                                          const char* verb) const {
  if (!tensor.defined() || !tensor.has_storage()) {
    entry.fail(verb, "the tensor has no storage");
  }
  if (tensor.requires_grad()) {
    entry.fail(verb, "the tensor belongs to an autograd graph, which would hold its bytes");
  }
  const int64_t dense_bytes = static_cast<int64_t>(tensor.nbytes());
  if (tensor.storage_offset() != 0 || !tensor.is_non_overlapping_and_dense() ||
      dense_bytes != storage_bytes(tensor)) {
    entry.fail(verb, fmt::format("a view, or a padded tensor: sizes [{}] strides [{}] offset {} "
                                 "cover {} B of a storage of {} B",
                                 fmt::join(tensor.sizes(), ","), fmt::join(tensor.strides(), ","),
                                 tensor.storage_offset(), dense_bytes, storage_bytes(tensor)));
  }
  if (tensor.device().is_cpu() && !device_.counts(tensor)) {
    entry.fail(verb, "the tensor's bytes are not counted by the device arena");
  }
}

void ActivationStore::check_sole_owner(const Entry& entry, const char* verb) const {
  const auto tensors = entry.tensor.use_count();
  const auto storages = entry.tensor.storage().use_count();
  if (tensors > 1 || storages > 1) {
    entry.fail(verb, fmt::format("others hold the storage too ({} tensor and {} storage holders), "
                                 "so its bytes would stay",
                                 tensors, storages));
  }
}

at::Tensor ActivationStore::empty_like(const Entry& entry) const {
  at::Tensor fresh =
      at::empty_strided(entry.layout.sizes, entry.layout.strides, entry.layout.options);
  BGL_CHECK(storage_bytes(fresh) == entry.size_bytes, entry.dump(), storage_bytes(fresh));
  return fresh;
}

void ActivationStore::free_device(Entry& entry) {
  entry.tensor.reset();
  device_resident_bytes_ -= entry.size_bytes;
}

void ActivationStore::free_host(Entry& entry) {
  entry.host.reset();
  host_resident_bytes_ -= entry.size_bytes;
}

void ActivationStore::wait_for(CopyTicket ticket) {
  using Clock = std::chrono::steady_clock;
  if (engine_.query(ticket)) {
    engine_.wait(ticket);  // only to hear of a failure
    return;
  }
  const auto start = Clock::now();
  const auto stop = [&] {
    stats_.wait_ns +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
  };
  try {
    engine_.wait(ticket, options_.copy_timeout_ns);
  } catch (...) {
    stop();
    throw;
  }
  stop();
}

void ActivationStore::close() noexcept {
  entries_.clear();
  device_resident_bytes_ = 0;
  host_resident_bytes_ = 0;
  open_ = false;
}

}  // namespace bagualu
