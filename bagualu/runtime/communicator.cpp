#include "bagualu/runtime/communicator.h"

#include <ATen/ATen.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {

struct Communicator::Impl {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  // Reused, so that no collective allocates in the middle of a micro-batch.
  at::Tensor gather_send, gather_recv;
};

namespace {

int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// Runs one collective to its end and adds its time to `busy_ns`.
template <class Start>
void complete(int64_t& busy_ns, const char* what, Start&& start) {
  const int64_t begin = now_ns();
  try {
    start()->wait();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception& error) {
    throw PeerLost(std::string(what) + " failed: " + error.what());
  }
  busy_ns += now_ns() - begin;
}

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

}  // namespace

Communicator::Communicator(const std::string& group_name, int64_t rank, int64_t size)
    : rank_(rank), size_(size) {
  BGL_CHECK(size >= 1 && rank >= 0 && rank < size, rank, size);
  BGL_CHECK(size == 1 || !group_name.empty(), group_name, size);
  if (size == 1) return;
  impl_ = new Impl;
  impl_->group = c10d::resolve_process_group(group_name);
  BGL_CHECK(impl_->group->getSize() == size, group_name, impl_->group->getSize(), size);
}

Communicator::~Communicator() { delete impl_; }

Communicator::Communicator(Communicator&& other) noexcept
    : impl_(std::exchange(other.impl_, nullptr)),
      rank_(other.rank_),
      size_(other.size_),
      busy_ns_(other.busy_ns_) {}

void Communicator::reserve_gather(int64_t n) {
  if (impl_ == nullptr) return;
  if (impl_->gather_send.defined() && impl_->gather_send.numel() == size_ * n) return;
  impl_->gather_send = at::empty({size_ * n}, at::kLong);
  impl_->gather_recv = at::empty({size_ * n}, at::kLong);
}

// As an all-to-all of copies: gloo's all-gather allocates a flat buffer on every call.
std::vector<int64_t> Communicator::all_gather(const std::vector<int64_t>& counts) {
  if (impl_ == nullptr) return counts;
  const int64_t n = static_cast<int64_t>(counts.size());
  reserve_gather(n);
  int64_t* send = impl_->gather_send.data_ptr<int64_t>();
  for (int64_t p = 0; p < size_; ++p) std::copy(counts.begin(), counts.end(), send + p * n);
  std::vector<int64_t> none;
  complete(busy_ns_, "exchange of token counts", [&] {
    return impl_->group->alltoall_base(impl_->gather_recv, impl_->gather_send, none, none);
  });
  const int64_t* recv = impl_->gather_recv.data_ptr<int64_t>();
  return {recv, recv + size_ * n};
}

void Communicator::all_to_all(const at::Tensor& send, const ops::WireLayout& send_layout,
                              at::Tensor& recv, const ops::WireLayout& recv_layout) {
  BGL_CHECK(impl_ != nullptr, "a group of one has nothing to exchange");
  std::vector<int64_t> send_sizes = segment_sizes(send_layout);
  std::vector<int64_t> recv_sizes = segment_sizes(recv_layout);
  at::Tensor source = borrow(send), target = borrow(recv);
  complete(busy_ns_, "all-to-all of expert rows", [&] {
    return impl_->group->alltoall_base(target, source, recv_sizes, send_sizes);
  });
}

void Communicator::all_reduce_sum(at::Tensor& tensor) {
  if (impl_ == nullptr) return;
  std::vector<at::Tensor> tensors = {borrow(tensor)};
  complete(busy_ns_, "all-reduce of gradients",
           [&] { return impl_->group->allreduce(tensors, c10d::AllreduceOptions()); });
}

int64_t Communicator::take_busy_ns() { return std::exchange(busy_ns_, 0); }

}  // namespace bagualu
