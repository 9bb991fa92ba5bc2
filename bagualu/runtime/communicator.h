#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bagualu/runtime/ops/row_map.h"
#include "bagualu/runtime/pending_comm.h"

namespace bagualu {

struct CommOptions {
  std::string name = "ranks";  ///< of the group in errors and traces: "ep", "pp"
  /// The members' ranks in the job, by rank in the group, for errors; empty = ranks in the group.
  std::vector<int64_t> job_ranks;
  /// How long any wait lasts before it throws DeadlineExceeded.
  int64_t deadline_ns = int64_t{30} * 1'000'000'000;
  /// A stated speed for all-to-alls (slow_link.h), for measurements: they count as done no earlier
  /// than such a link would have had them. 0 = as fast as they are.
  int64_t link_bytes_per_s = 0;
  int64_t link_latency_ns = 0;
};

/// The communication of one rank over a torch.distributed group made by Python.
/// A group of one (empty name) does nothing and copies where data has to move.
/// Invariants: every collective is issued by all ranks of the group, in the same order, whatever
///             their row counts; a rank with zero rows issues too. Sends and receives match by
///             (sender, receiver, tag), in the order of issue. A send may end only once its receive
///             was posted.
/// Threads: one thread at a time. What is pending runs beside it.
/// Throws:  PeerLost, DeadlineExceeded
class Communicator {
 public:
  /// `group_name` as torch.distributed knows it; "" = this rank alone.
  Communicator(const std::string& group_name, int64_t rank, int64_t size, CommOptions options = {});
  ~Communicator();
  Communicator(Communicator&&) noexcept;

  int64_t size() const { return size_; }
  int64_t rank() const { return rank_; }

  /// Makes the buffers of all_gather() for `n` counts, so that no micro-batch has to.
  void reserve_gather(int64_t n);
  /// Shapes: counts int64 [n] of every rank -> [size * n], rank-major.
  std::vector<int64_t> all_gather(const std::vector<int64_t>& counts);
  /// Sum over the group, in place, in an order that depends on the group only.
  void all_reduce_sum(at::Tensor& tensor);
  /// The least value of the group, the same on every rank: what all agree to.
  int64_t all_reduce_min(int64_t value);

  /// Segment p of `send` goes to peer p, into segment rank() of its `recv`.
  /// Requires: size() > 1; both tensors live and `send` unchanged while it is pending.
  PendingComm issue_all_to_all(const at::Tensor& send, const ops::WireLayout& send_layout,
                               at::Tensor& recv, const ops::WireLayout& recv_layout,
                               const std::string& label);
  void all_to_all(const at::Tensor& send, const ops::WireLayout& send_layout, at::Tensor& recv,
                  const ops::WireLayout& recv_layout);

  /// `peer` is a rank of the group, this one included: the message is then delivered when its
  /// second half is issued, and must not be awaited earlier. Requires: dense tensors, as for
  /// issue_all_to_all(); tag >= 0.
  PendingComm issue_send(const at::Tensor& tensor, int64_t peer, int64_t tag,
                         const std::string& label);
  PendingComm issue_recv(at::Tensor& tensor, int64_t peer, int64_t tag, const std::string& label);

  /// Times of the last collective that was awaited where it was issued.
  const CommTimes& last_blocking() const;
  /// Time this thread was blocked in communication since the last call.
  int64_t take_busy_ns();

 private:
  friend class PendingComm;
  struct Impl;

  PendingComm issue_point(bool sends, const at::Tensor& tensor, int64_t peer, int64_t tag,
                          const std::string& label);

  std::unique_ptr<Impl> impl_;
  int64_t rank_;
  int64_t size_;
};

}  // namespace bagualu
