#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/runtime/deadline.h"

namespace bagualu {

enum class Direction { kD2H = 0, kH2D = 1 };
inline constexpr int kDirections = 2;

/// "D2H" or "H2D".
std::string_view direction_name(Direction direction);

/// Names one issued copy. Never reused, so a ticket cannot come to mean a later copy.
/// The default ticket means "no copy" and counts as done.
struct CopyTicket {
  Direction direction = Direction::kD2H;
  /// Place in the order of its direction, from 1; 0 = no copy.
  uint64_t sequence = 0;

  bool is_none() const { return sequence == 0; }
  friend bool operator==(const CopyTicket&, const CopyTicket&) = default;
};

/// A copy ended without its bytes being there: it failed, was cancelled, or its `after` did not
/// succeed.
class TransferFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct TransferStats {
  /// Indexed by Direction. Failed copies count no bytes.
  std::array<int64_t, kDirections> copied_bytes{};
  /// Time in which the direction really moved bytes.
  std::array<int64_t, kDirections> busy_ns{};
  /// Time that callers of wait() were blocked.
  int64_t wait_ns = 0;
};

/// One copy as it happened, on the steady clock (the fake engine: on its own).
struct CopyRecord {
  CopyTicket ticket;
  int64_t size_bytes = 0;
  int64_t issued_ns = 0;
  int64_t begin_ns = 0;  ///< it really started
  int64_t end_ns = 0;
};

/// Copies between device and host memory, beside the computation.
/// Invariants: copies of one direction run one after the other in the order of issue; the two
///          directions run at once; a copy starts only after its `after` succeeded. As `after` is
///          always issued earlier, no set of copies can wait in a circle.
/// Threads: any.
/// Destructor: finishes every issued copy.
class TransferEngine {
 public:
  static constexpr int64_t kNoTimeout = std::numeric_limits<int64_t>::max();
  static constexpr int64_t kDefaultTimeoutNs = int64_t{30} * 1'000'000'000;

  virtual ~TransferEngine() = default;

  /// Issues a copy and returns at once. `label` appears in every error about it.
  /// Requires: both memories stay valid and `src` unchanged until the copy ended (wait returned, or
  ///           threw TransferFailed); `after` was issued by this engine.
  virtual CopyTicket copy(Direction direction, void* dst, const void* src, int64_t size_bytes,
                          CopyTicket after = {}, std::string label = {}) = 0;

  /// Returns when the copy's bytes are in place.
  /// Throws: DeadlineExceeded after `timeout_ns`; TransferFailed with the cause, at every wait.
  virtual void wait(CopyTicket ticket, int64_t timeout_ns = kDefaultTimeoutNs) = 0;

  /// Whether the copy ended, in success or not; never blocks.
  virtual bool query(CopyTicket ticket) = 0;

  /// Asks that the copy end early; it may still succeed. The caller must wait before it frees.
  virtual void cancel(CopyTicket ticket) noexcept = 0;

  virtual TransferStats stats() const = 0;

  /// While on, every copy that ends leaves a record.
  void set_recording(bool on);
  /// Records since the last call, in the order of ending.
  std::vector<CopyRecord> take_records();

 protected:
  /// For the engines; from any thread.
  void record(const CopyRecord& copy);

 private:
  std::mutex records_mutex_;
  bool recording_ = false;
  std::vector<CopyRecord> records_;
};

/// "H2D copy of LABEL".
std::string transfer_text(Direction direction, std::string_view label);
/// "H2D copy of LABEL failed: CAUSE".
std::string transfer_failure_text(Direction direction, std::string_view label,
                                  std::string_view cause);

}  // namespace bagualu
