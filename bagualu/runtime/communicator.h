#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bagualu/runtime/ops/row_map.h"

namespace bagualu {

/// A collective failed or timed out: some peer is gone. The text is the backend's; who is gone is
/// found out by the launcher's heartbeats.
class PeerLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The collectives one rank needs, over a torch.distributed group made by Python.
/// A group of one (empty name) does nothing and copies where data has to move.
/// Invariants: every call is made by all ranks of the group, in the same order, whatever their row
///             counts; a rank with zero rows calls too.
/// Threads: one thread at a time.
/// Throws:  PeerLost
class Communicator {
 public:
  /// `group_name` as torch.distributed knows it; "" = this rank alone.
  Communicator(const std::string& group_name, int64_t rank, int64_t size);
  ~Communicator();
  Communicator(Communicator&&) noexcept;

  int64_t size() const { return size_; }
  int64_t rank() const { return rank_; }

  /// Makes the buffers of all_gather() for `n` counts, so that no micro-batch has to.
  void reserve_gather(int64_t n);
  /// Shapes: counts int64 [n] of every rank -> [size * n], rank-major.
  std::vector<int64_t> all_gather(const std::vector<int64_t>& counts);
  /// Segment p of `send` goes to peer p, into segment rank() of its `recv`.
  void all_to_all(const at::Tensor& send, const ops::WireLayout& send_layout, at::Tensor& recv,
                  const ops::WireLayout& recv_layout);
  /// Sum over the group, in place, in an order that depends on the group only.
  void all_reduce_sum(at::Tensor& tensor);

  /// Time spent inside collectives since the last call.
  int64_t take_busy_ns();

 private:
  struct Impl;
  Impl* impl_ = nullptr;
  int64_t rank_;
  int64_t size_;
  int64_t busy_ns_ = 0;
};

}  // namespace bagualu
