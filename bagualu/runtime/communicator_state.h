// Inside of Communicator and PendingComm, not for others.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "bagualu/runtime/clock.h"
#include "bagualu/runtime/communicator.h"
#include "bagualu/runtime/pending_comm.h"
#include "bagualu/runtime/slow_link.h"

namespace bagualu {

/// A message of a rank to itself: between two stages that it holds. Delivered when both halves are
/// issued, by the thread that issues the later one.
struct LocalMessage {
  at::Tensor source, target;  ///< defined once issued
  bool delivered = false;
  bool withdrawn = false;
};

struct Communicator::Impl {
  explicit Impl(CommOptions options)
      : options(std::move(options)),
        link({this->options.link_bytes_per_s, this->options.link_latency_ns}) {}

  using Start = std::function<c10::intrusive_ptr<c10d::Work>()>;
  /// Starts `what` with these members of the group.
  PendingComm issue(const std::string& what, const std::vector<int64_t>& with, const Start& start);
  PendingComm issue_collective(const std::string& what, int64_t size_bytes, const Start& start);
  void run_collective(const std::string& what, int64_t size_bytes, const Start& start);

  /// One half of a message to this rank itself.
  PendingComm issue_local(const std::string& what, int64_t tag, const at::Tensor& tensor,
                          bool sends);

  int64_t rank = 0;
  c10::intrusive_ptr<c10d::ProcessGroup> group;  ///< none in a group of one
  CommOptions options;
  SlowLink link;
  std::string channel;  ///< name and first rank: no two groups of a job have the same
  int64_t collectives = 0;
  CommTimes last_blocking;
  int64_t blocked_ns = 0;
  /// What was withdrawn; peers may still try to complete it, so nothing is issued after it.
  std::string broken_by;
  // Reused, so that no collective allocates in the middle of a micro-batch.
  at::Tensor gather_send, gather_recv;
  at::Tensor vote;
  /// Messages to itself of which one half is missing, by tag, oldest first.
  std::map<int64_t, std::deque<std::shared_ptr<LocalMessage>>> mailbox;
};

struct PendingComm::State {
  Communicator::Impl* owner = nullptr;
  c10::intrusive_ptr<c10d::Work> work;  ///< none: ended, or a message of this rank to itself
  std::shared_ptr<LocalMessage> local;
  std::string label;
  CommTimes times;
  /// Written by the backend's thread when the data was in place; null for sends and receives.
  std::shared_ptr<std::atomic<int64_t>> ended_ns;
  int64_t link_done_ns = 0;  ///< 0 = no emulated link
  bool point_to_point = false;
  bool on_cpu = true;
};

}  // namespace bagualu
