#include "bagualu/runtime/communicator.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/runtime/communicator_state.h"

namespace bagualu {
namespace {

// The same bytes in a storage of their own that owns nothing. The backend's worker thread drops its
// work item some time after wait() returned; were it the real tensor, its bytes would not be free
// when the timeline says so. After wait() no backend touches the memory any more.
at::Tensor borrow(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.options());
}

std::vector<int64_t> segment_sizes(const ops::WireLayout& layout) {
  std::vector<int64_t> sizes(layout.peers());
  for (int64_t p = 0; p < layout.peers(); ++p) sizes[p] = layout.segment_bytes(p);
  return sizes;
}

std::string ranks_text(const CommOptions& options, const std::vector<int64_t>& members) {
  std::vector<int64_t> ranks;
  for (int64_t member : members) {
    ranks.push_back(options.job_ranks.empty() ? member : options.job_ranks.at(member));
  }
  return fmt::format("group {}, with rank{} {}", options.name, ranks.size() > 1 ? "s" : "",
                     fmt::join(ranks, ", "));
}

std::vector<int64_t> all_but(int64_t me, int64_t size) {
  std::vector<int64_t> others;
  for (int64_t r = 0; r < size; ++r) {
    if (r != me) others.push_back(r);
  }
  return others;
}

// The time at which a collective ended is known to the backend's thread only.
std::shared_ptr<std::atomic<int64_t>> watch_end(c10d::Work& work) {
  auto ended_ns = std::make_shared<std::atomic<int64_t>>(0);
  try {
    work.getFuture()->addCallback([ended_ns](c10::ivalue::Future&) { *ended_ns = steady_now_ns(); },
                                  /*uses_future=*/false);
  } catch (const c10::Error&) {
    return nullptr;  // a backend without futures: the wait's return stands in
  }
  return ended_ns;
}

}  // namespace

Communicator::Communicator(const std::string& group_name, int64_t rank, int64_t size,
                           CommOptions options)
    : rank_(rank), size_(size) {
  BGL_CHECK(size >= 1 && rank >= 0 && rank < size, rank, size);
  BGL_CHECK(size == 1 || !group_name.empty(), group_name, size);
  BGL_CHECK(options.job_ranks.empty() || static_cast<int64_t>(options.job_ranks.size()) == size,
            options.name, options.job_ranks.size(), size);
  BGL_CHECK(options.deadline_ns > 0, options.name, options.deadline_ns);
  impl_ = std::make_unique<Impl>(std::move(options));
  impl_->rank = rank;
  const std::vector<int64_t>& members = impl_->options.job_ranks;
  impl_->channel = impl_->options.name + std::to_string(members.empty() ? 0 : members.front());
  if (size == 1) return;
  impl_->group = c10d::resolve_process_group(group_name);
  BGL_CHECK(impl_->group->getSize() == size, group_name, impl_->group->getSize(), size);
  impl_->vote = at::empty({1}, at::kLong);
}

Communicator::~Communicator() = default;
Communicator::Communicator(Communicator&& other) noexcept = default;

PendingComm Communicator::Impl::issue(const std::string& what, const std::vector<int64_t>& with,
                                      const Start& start) {
  auto state = std::make_unique<PendingComm::State>();
  state->owner = this;
  state->label = fmt::format("{}, {}", what, ranks_text(options, with));
  if (!broken_by.empty()) {
    throw PeerLost(fmt::format("{} failed: the group is out of step since {} was given up",
                               state->label, broken_by));
  }
  state->times.issued_ns = steady_now_ns();
  try {
    state->work = start();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception& error) {
    throw PeerLost(state->label + " failed: " + error.what());
  }
  blocked_ns += steady_now_ns() - state->times.issued_ns;
  return PendingComm(std::move(state));
}

PendingComm Communicator::Impl::issue_collective(const std::string& what, int64_t size_bytes,
                                                 const Start& start) {
  PendingComm pending = issue(what, all_but(rank, group->getSize()), start);
  PendingComm::State& state = *pending.state_;
  state.ended_ns = watch_end(*state.work);
  state.times.size_bytes = size_bytes;
  state.times.channel = channel;
  state.times.sequence = collectives++;
  return pending;
}

void Communicator::Impl::run_collective(const std::string& what, int64_t size_bytes,
                                        const Start& start) {
  PendingComm pending = issue_collective(what, size_bytes, start);
  pending.wait();
  last_blocking = pending.times();
}

const CommTimes& Communicator::last_blocking() const { return impl_->last_blocking; }

void Communicator::reserve_gather(int64_t n) {
  if (size_ == 1) return;
  if (impl_->gather_send.defined() && impl_->gather_send.numel() == size_ * n) return;
  impl_->gather_send = at::empty({size_ * n}, at::kLong);
  impl_->gather_recv = at::empty({size_ * n}, at::kLong);
}

// As an all-to-all of copies: gloo's all-gather allocates a flat buffer on every call.
std::vector<int64_t> Communicator::all_gather(const std::vector<int64_t>& counts) {
  if (size_ == 1) return counts;
  const int64_t n = static_cast<int64_t>(counts.size());
  reserve_gather(n);
  int64_t* send = impl_->gather_send.data_ptr<int64_t>();
  for (int64_t p = 0; p < size_; ++p) std::copy(counts.begin(), counts.end(), send + p * n);
  std::vector<int64_t> none;
  impl_->run_collective("exchange of token counts", size_ * n * 8, [&] {
    return impl_->group->alltoall_base(impl_->gather_recv, impl_->gather_send, none, none);
  });
  const int64_t* recv = impl_->gather_recv.data_ptr<int64_t>();
  return {recv, recv + size_ * n};
}

void Communicator::all_reduce_sum(at::Tensor& tensor) {
  if (size_ == 1) return;
  std::vector<at::Tensor> tensors = {borrow(tensor)};
  impl_->run_collective("all-reduce", static_cast<int64_t>(tensor.nbytes()),
                        [&] { return impl_->group->allreduce(tensors, c10d::AllreduceOptions()); });
}

int64_t Communicator::all_reduce_min(int64_t value) {
  if (size_ == 1) return value;
  std::vector<at::Tensor> tensors = {impl_->vote};
  *impl_->vote.data_ptr<int64_t>() = value;
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MIN;
  impl_->run_collective("vote", 8, [&] { return impl_->group->allreduce(tensors, options); });
  return *impl_->vote.data_ptr<int64_t>();
}

PendingComm Communicator::issue_all_to_all(const at::Tensor& send,
                                           const ops::WireLayout& send_layout, at::Tensor& recv,
                                           const ops::WireLayout& recv_layout,
                                           const std::string& label) {
  BGL_CHECK(size_ > 1, label, "a group of one has nothing to exchange");
  std::vector<int64_t> send_sizes = segment_sizes(send_layout);
  std::vector<int64_t> recv_sizes = segment_sizes(recv_layout);
  at::Tensor source = borrow(send), target = borrow(recv);
  // What a rank keeps does not go over a link.
  const int64_t size_bytes = std::max(send_layout.total_bytes() - send_layout.segment_bytes(rank_),
                                      recv_layout.total_bytes() - recv_layout.segment_bytes(rank_));
  PendingComm pending = impl_->issue_collective("all-to-all of " + label, size_bytes, [&] {
    return impl_->group->alltoall_base(target, source, recv_sizes, send_sizes);
  });
  PendingComm::State& state = *pending.state_;
  state.on_cpu = send.is_cpu();
  state.link_done_ns = impl_->link.take(state.times.issued_ns, size_bytes);
  return pending;
}

void Communicator::all_to_all(const at::Tensor& send, const ops::WireLayout& send_layout,
                              at::Tensor& recv, const ops::WireLayout& recv_layout) {
  issue_all_to_all(send, send_layout, recv, recv_layout, "expert rows").wait();
}

PendingComm Communicator::issue_send(const at::Tensor& tensor, int64_t peer, int64_t tag,
                                     const std::string& label) {
  return issue_point(true, tensor, peer, tag, "send of " + label);
}

PendingComm Communicator::issue_recv(at::Tensor& tensor, int64_t peer, int64_t tag,
                                     const std::string& label) {
  return issue_point(false, tensor, peer, tag, "receive of " + label);
}

PendingComm Communicator::issue_point(bool sends, const at::Tensor& tensor, int64_t peer,
                                      int64_t tag, const std::string& label) {
  constexpr int64_t kTags = int64_t{1} << 31;
  BGL_CHECK(peer >= 0 && peer < size_ && tag >= 0 && tag < kTags, label, peer, size_, tag);
  if (peer == rank_) return impl_->issue_local(label, tag, tensor, sends);
  std::vector<at::Tensor> tensors = {borrow(tensor)};
  PendingComm pending = impl_->issue(label, {peer}, [&] {
    const int to = static_cast<int>(peer), with_tag = static_cast<int>(tag);
    return sends ? impl_->group->send(tensors, to, with_tag)
                 : impl_->group->recv(tensors, to, with_tag);
  });
  pending.state_->point_to_point = true;
  pending.state_->on_cpu = tensor.is_cpu();
  pending.state_->times.size_bytes = static_cast<int64_t>(tensor.nbytes());
  return pending;
}

PendingComm Communicator::Impl::issue_local(const std::string& what, int64_t tag,
                                            const at::Tensor& tensor, bool sends) {
  auto state = std::make_unique<PendingComm::State>();
  state->owner = this;
  state->label = what + ", on this rank";
  state->times.issued_ns = steady_now_ns();
  state->times.size_bytes = static_cast<int64_t>(tensor.nbytes());
  auto& waiting = mailbox[tag];
  while (!waiting.empty() && waiting.front()->withdrawn) waiting.pop_front();
  if (!waiting.empty() && (sends ? waiting.front()->target : waiting.front()->source).defined()) {
    state->local = waiting.front();
    waiting.pop_front();
  } else {
    state->local = waiting.emplace_back(std::make_shared<LocalMessage>());
  }
  if (waiting.empty()) mailbox.erase(tag);
  LocalMessage& message = *state->local;
  (sends ? message.source : message.target) = borrow(tensor);
  if (message.source.defined() && message.target.defined()) {
    message.target.copy_(message.source);
    message.delivered = true;
  }
  return PendingComm(std::move(state));
}

int64_t Communicator::take_busy_ns() { return std::exchange(impl_->blocked_ns, 0); }

}  // namespace bagualu
