#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/runtime/activation_store_record.h"
#include "bagualu/runtime/device_arena.h"
#include "bagualu/runtime/host_arena.h"
#include "bagualu/runtime/transfer.h"

namespace bagualu {

/// The host had no room for an offload. The storage stays LIVE, so the caller can degrade (keep it
/// or drop and recompute it).
class HostOverLimit : public std::runtime_error {
 public:
  HostOverLimit(const std::string& storage, const HostFull& full);
  const HostFull& full() const { return full_; }

 private:
  HostFull full_;
};

struct ActivationStoreOptions {
  /// Checksum at offload, compared at drain (source changed under the copy) and at await. Costs two
  /// more reads of every offloaded byte; for tests and for hunting a corruption.
  bool verify_checksums = false;
  /// How long drain and await wait for one copy before they throw DeadlineExceeded.
  int64_t copy_timeout_ns = TransferEngine::kDefaultTimeoutNs;
};

/// Of one micro-batch, from begin() on. Bytes are exact storage sizes, not rounded.
struct ActivationStoreStats {
  int64_t bytes_offloaded = 0;
  int64_t bytes_reloaded = 0;
  int64_t bytes_recomputed = 0;
  int64_t bytes_encoded = 0;
  /// Time blocked in drain and await.
  int64_t wait_ns = 0;
};

/// Holds every activation storage of one micro-batch and moves it as the executor says; decides
/// nothing. Storages are named by their index in the list given to begin().
///
/// Invariants: each storage is in one state and moves only as the table in
/// activation_store_record.h allows; what a communication uses stays as it is; a reload is issued
/// behind its own offload; device bytes go back only after the copy out ended and host bytes only
/// after the copy in ended; bytes said to be freed are freed. Throws:  InternalError with a dump of
/// the storage (key, state history, shape) on any step that
///          the table forbids; the state is then unchanged.
/// Threads: one thread at a time.
/// Owns:    its tensors and host blocks. Arenas and engine outlive it.
class ActivationStore {
 public:
  ActivationStore(DeviceArena& device, HostArena& host, TransferEngine& engine,
                  ActivationStoreOptions options = {});
  ActivationStore(const ActivationStore&) = delete;
  ActivationStore& operator=(const ActivationStore&) = delete;
  /// As abort().
  ~ActivationStore();

  /// Starts a micro-batch; all storages are empty.
  /// Requires: no micro-batch is open.
  void begin(int64_t step, int64_t microbatch, std::vector<StorageInfo> storages);

  /// Takes a new storage, once per id. Strides, offset and dtype are kept through any move.
  /// Requires: `tensor` covers its whole storage (dense, offset 0), is counted by the device arena
  ///           and is no part of an autograd graph.
  void put(int id, at::Tensor tensor);

  /// Takes a storage that was dropped and has been computed again.
  void put_recomputed(int id, at::Tensor tensor);

  /// Requires: the storage is on the device and no copy of it runs.
  /// Returns:  a reference that is valid until the next step on `id`; a copy of it must be gone
  ///           before the storage is freed.
  const at::Tensor& get(int id) const;
  bool is_live(int id) const;

  /// Frees the bytes; they may be recomputed later.
  void drop(int id);
  /// Frees the bytes for good, on the device or on the host.
  void release(int id);

  /// Issues the copy to the host; the device bytes stay until drain().
  /// Throws: HostOverLimit, state unchanged.
  void offload(int id);
  /// As offload(), with the refusal as a value. Returns: nullopt when issued.
  std::optional<HostFull> try_offload(int id);
  /// Waits until the copy ended and frees the device bytes.
  /// Throws: DeadlineExceeded, TransferFailed; the device bytes are then kept.
  void drain(int id);
  /// Takes device memory and issues the copy back.
  /// Throws: OverBudget, state unchanged.
  void reload(int id);
  /// Waits until the bytes are back on the device and frees the host block.
  /// Throws: DeadlineExceeded, TransferFailed.
  void await(int id);

  /// Replaces the storage by int8 codes on the device (ops/quantise.h); changes its values.
  /// Requires: floating values. Throws: OverBudget, state unchanged.
  void encode(int id);
  /// Makes the storage again, with the values the codes stand for, and frees the codes.
  /// Throws: OverBudget, state unchanged.
  void decode(int id);

  /// A communication reads or writes the storage from now on: until take_back() it can be neither
  /// read nor moved nor freed.
  void lend(int id);
  /// The communication ended.
  void take_back(int id);

  /// Closes the micro-batch.
  /// Requires: every storage is released, dropped or was never put; no copy runs; no byte is held.
  ActivationStoreStats finish();

  /// Closes the micro-batch after an error: cancels copies, waits until they ended, frees all.
  void abort() noexcept;

  /// The copy issued last for a storage, in or out, and its bytes.
  std::pair<CopyTicket, int64_t> last_copy(int id) const;

  /// Of the open micro-batch, or of the last one when none is open.
  const ActivationStoreStats& stats() const { return stats_; }
  /// Bytes of device storages and encoded copies, and of host blocks, held now.
  int64_t device_resident_bytes() const { return device_resident_bytes_; }
  int64_t host_resident_bytes() const { return host_resident_bytes_; }

 private:
  struct Entry;

  Entry& entry(int id, const char* verb);
  const Entry& entry(int id, const char* verb) const;
  void adopt(int id, at::Tensor tensor, StorageState to, const char* verb);
  void check_whole_storage(const Entry& entry, const at::Tensor& tensor, const char* verb) const;
  void check_sole_owner(const Entry& entry, const char* verb) const;
  at::Tensor empty_like(const Entry& entry) const;
  void free_device(Entry& entry);
  void free_host(Entry& entry);
  void wait_for(CopyTicket ticket);
  void close() noexcept;

  DeviceArena& device_;
  HostArena& host_;
  TransferEngine& engine_;
  ActivationStoreOptions options_;
  ActivationStoreStats stats_;
  std::vector<Entry> entries_;
  int64_t step_ = 0;
  int64_t microbatch_ = 0;
  bool open_ = false;
  /// Grows with every storage ever taken, so two storages at one address never look the same.
  uint64_t last_generation_ = 0;
  int64_t device_resident_bytes_ = 0;
  int64_t host_resident_bytes_ = 0;
  /// Offloaded bytes that were released on the host, never reloaded.
  int64_t host_discarded_bytes_ = 0;
};

}  // namespace bagualu
