#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bagualu {

/// One storage of the micro-batch graph. `layer` is -1 for those outside the layers.
struct StorageInfo {
  std::string name;
  int layer = -1;
};

/// Where a storage is.
///
///   EMPTY ----put----> LIVE --offload--> D2H --drain--> HOST --reload--> H2D --await--> LIVE
///   LIVE --drop--> DROPPED --put_recomputed--> RECOMPUTED (then as LIVE)
///   LIVE or RECOMPUTED --encode--> ENCODED --decode--> LIVE
///   LIVE or RECOMPUTED --lend--> LENT --take_back--> LIVE
///   LIVE, RECOMPUTED or HOST --release--> RELEASED
enum class StorageState {
  kEmpty,
  kLive,
  kD2H,
  kHost,
  kH2D,
  kDropped,
  kRecomputed,
  kEncoded,
  kLent,  ///< a communication reads or writes it
  kReleased,
};
inline constexpr int kStorageStates = 10;

std::string_view state_name(StorageState state);

/// The table above.
bool is_legal(StorageState from, StorageState to);

/// Identity and history of one storage; holds no bytes.
/// Key: (step, microbatch, layer, name, generation), used once.
class StorageRecord {
 public:
  StorageRecord(int64_t step, int64_t microbatch, StorageInfo info);

  StorageState state() const { return history_.back(); }
  bool is_live() const;
  uint64_t generation() const { return generation_; }
  const StorageInfo& info() const { return info_; }

  /// Throws: InternalError with dump(), unless is_legal(state(), to).
  void check_move(StorageState to, std::string_view verb) const;
  /// Moves on; `generation` names new device bytes, 0 keeps the present ones.
  void move(StorageState to, std::string_view verb, uint64_t generation = 0);

  /// "step 3 microbatch 0 layer 2 storage moe_act.out generation 5".
  std::string key() const;
  /// key() and the states gone through.
  std::string dump() const;

 private:
  int64_t step_;
  int64_t microbatch_;
  StorageInfo info_;
  uint64_t generation_ = 0;
  std::vector<StorageState> history_;
};

}  // namespace bagualu
