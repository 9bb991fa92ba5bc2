#include "bagualu/runtime/loopback_group.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kPoison = 0xCD;

void poison(const at::Tensor& tensor) {
  if (tensor.nbytes() > 0) std::memset(tensor.data_ptr(), kPoison, tensor.nbytes());
}

class LoopbackWork final : public c10d::Work {
 public:
  explicit LoopbackWork(std::shared_ptr<std::mutex> mutex)
      : future_(c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get())),
        fabric_mutex_(std::move(mutex)) {}

  // After this the memory is left alone.
  void abort() override {
    const std::lock_guard lock(*fabric_mutex_);
    withdrawn_ = true;
  }
  bool withdrawn() const { return withdrawn_; }

  void end(const std::string& failure) {
    if (failure.empty()) {
      future_->markCompleted();
      finish();
      return;
    }
    const auto error = std::make_exception_ptr(std::runtime_error(failure));
    future_->setError(error);
    finish(error);
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::shared_ptr<std::mutex> fabric_mutex_;
  bool withdrawn_ = false;
};

using WorkPtr = c10::intrusive_ptr<LoopbackWork>;

// Bytes of one rank's part, by peer.
struct Segments {
  char* data = nullptr;
  std::vector<int64_t> begin, bytes;
};

Segments segments(const at::Tensor& tensor, const std::vector<int64_t>& sizes, int64_t peers) {
  Segments result{static_cast<char*>(tensor.data_ptr()), {}, {}};
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 0;
  const int64_t row_bytes = rows > 0 ? static_cast<int64_t>(tensor.nbytes()) / rows : 0;
  int64_t at = 0;
  for (int64_t p = 0; p < peers; ++p) {
    const int64_t n = (sizes.empty() ? rows / peers : sizes[p]) * row_bytes;
    result.begin.push_back(at);
    result.bytes.push_back(n);
    at += n;
  }
  return result;
}

enum class What { kAllToAll, kSum, kMin };

struct Part {
  WorkPtr work;
  What what{};
  Segments send, recv;
  at::Tensor reduced;
};

template <class T>
void reduce(std::vector<Part>& parts) {
  const int64_t n = parts[0].reduced.numel();
  for (int64_t i = 0; i < n; ++i) {
    T value = parts[0].reduced.data_ptr<T>()[i];
    for (size_t r = 1; r < parts.size(); ++r) {
      const T other = parts[r].reduced.data_ptr<T>()[i];
      value = parts[0].what == What::kSum ? static_cast<T>(value + other) : std::min(value, other);
    }
    for (Part& part : parts) part.reduced.data_ptr<T>()[i] = value;
  }
}

void carry_out(std::vector<Part>& parts) {
  for (const Part& part : parts) {
    BGL_CHECK(part.what == parts[0].what, "ranks call different collectives");
  }
  if (parts[0].what == What::kAllToAll) {
    for (size_t to = 0; to < parts.size(); ++to) {
      for (size_t from = 0; from < parts.size(); ++from) {
        const Segments &out = parts[from].send, &in = parts[to].recv;
        BGL_CHECK(out.bytes[to] == in.bytes[from], from, to, out.bytes[to], in.bytes[from]);
        if (out.bytes[to] > 0) {
          std::memcpy(in.data + in.begin[from], out.data + out.begin[to], out.bytes[to]);
        }
      }
    }
    return;
  }
  switch (parts[0].reduced.scalar_type()) {
    case at::kFloat:
      return reduce<float>(parts);
    case at::kDouble:
      return reduce<double>(parts);
    case at::kLong:
      return reduce<int64_t>(parts);
    default:
      throw InternalError("no such reduction on the loopback group");
  }
}

}  // namespace

class LoopbackGroup::Fabric {
 public:
  Fabric(int64_t size, LoopbackOptions options)
      : size_(size),
        options_(options),
        random_(options.seed),
        issued_(size, 0),
        dead_(size, false) {
    mover_ = std::thread([this] { move(); });
  }
  ~Fabric() {
    {
      const std::lock_guard lock(*mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    mover_.join();
  }

  WorkPtr collective(int64_t rank, Part part) {
    const std::lock_guard lock(*mutex_);
    part.work = c10::make_intrusive<LoopbackWork>(mutex_);
    const WorkPtr work = part.work;
    ++unended_;
    Round& round = rounds_[issued_[rank]++];
    round.parts.resize(size_);
    round.parts[rank] = std::move(part);
    ++round.there;
    if (std::find(dead_.begin(), dead_.end(), true) != dead_.end()) {
      end_later(work, "Connection closed by peer");
    } else if (round.there == size_) {
      const int64_t number = issued_[rank] - 1;
      at_random_time([this, number] { run_round(number); });
    }
    return work;
  }

  WorkPtr point(int64_t from, int64_t to, int64_t tag, at::Tensor tensor, bool sends) {
    const std::lock_guard lock(*mutex_);
    const WorkPtr work = c10::make_intrusive<LoopbackWork>(mutex_);
    ++unended_;
    if (dead_[from] || dead_[to]) {
      end_later(work, "Connection closed by peer");
      return work;
    }
    Mailbox& box = mailboxes_[{from, to, tag}];
    auto& mine = sends ? box.sends : box.receives;
    mine.push_back({work, std::move(tensor)});
    if (!box.sends.empty() && !box.receives.empty()) {
      const Letter out = box.sends.front(), in = box.receives.front();
      box.sends.pop_front();
      box.receives.pop_front();
      at_random_time([this, out, in] { deliver(out, in); });
    }
    return work;
  }

  void stall(bool stalled) {
    const std::lock_guard lock(*mutex_);
    stalled_ = stalled;
    changed_.notify_all();
  }

  void kill(int64_t rank) {
    const std::lock_guard lock(*mutex_);
    dead_[rank] = true;
    for (auto& [number, round] : rounds_) {
      for (const Part& part : round.parts) {
        if (part.work && round.there < size_) end_later(part.work, "Connection closed by peer");
      }
    }
    for (auto& [key, box] : mailboxes_) {
      if (std::get<0>(key) != rank && std::get<1>(key) != rank) continue;
      for (auto* letters : {&box.sends, &box.receives}) {
        for (const Letter& letter : *letters) end_later(letter.work, "Connection closed by peer");
        letters->clear();
      }
    }
  }

  void fail_next(const std::string& cause) {
    const std::lock_guard lock(*mutex_);
    next_failure_ = cause;
  }

  int64_t unended() const {
    const std::lock_guard lock(*mutex_);
    return unended_;
  }

  int64_t ended() const {
    const std::lock_guard lock(*mutex_);
    return ended_;
  }

 private:
  struct Letter {
    WorkPtr work;
    at::Tensor tensor;
  };
  struct Mailbox {
    std::deque<Letter> sends, receives;
  };
  struct Round {
    std::vector<Part> parts;
    int64_t there = 0;
  };

  // The functions below are called with the lock held, and so are the jobs.

  void at_random_time(std::function<void()> job) {
    std::uniform_int_distribution<int64_t> delay(0, options_.max_delay_ns);
    jobs_.emplace(Clock::now() + std::chrono::nanoseconds(delay(random_)), std::move(job));
    changed_.notify_all();
  }

  void end_later(const WorkPtr& work, const std::string& failure) {
    at_random_time([this, work, failure] {
      if (work->isCompleted()) return;
      --unended_;
      ++ended_;
      work->end(failure);
    });
  }

  void run_round(int64_t number) {
    Round round = std::move(rounds_.at(number));
    rounds_.erase(number);
    std::string failure = std::exchange(next_failure_, {});
    try {
      if (failure.empty()) carry_out(round.parts);
    } catch (const std::exception& error) {
      failure = error.what();
    }
    for (const Part& part : round.parts) end_later(part.work, failure);
  }

  void deliver(const Letter& out, const Letter& in) {
    const bool fits = out.tensor.nbytes() == in.tensor.nbytes();
    const bool withdrawn = out.work->withdrawn() || in.work->withdrawn();
    if (fits && !withdrawn && out.tensor.nbytes() > 0) {
      std::memcpy(in.tensor.data_ptr(), out.tensor.data_ptr(), out.tensor.nbytes());
    }
    for (const Letter& letter : {out, in}) end_later(letter.work, fits ? "" : "sizes differ");
  }

  void move() {
    std::unique_lock lock(*mutex_);
    while (!stopping_ || !jobs_.empty()) {
      if (jobs_.empty() || (stalled_ && !stopping_)) {
        changed_.wait(lock);
        continue;
      }
      const auto due = jobs_.begin()->first;
      if (Clock::now() < due && !stopping_) {
        changed_.wait_until(lock, due);
        continue;
      }
      const auto job = std::move(jobs_.begin()->second);
      jobs_.erase(jobs_.begin());
      job();
    }
  }

  const int64_t size_;
  const LoopbackOptions options_;
  std::shared_ptr<std::mutex> mutex_ = std::make_shared<std::mutex>();
  std::condition_variable changed_;
  std::mt19937_64 random_;
  std::vector<int64_t> issued_;  // by rank: collectives so far
  std::vector<bool> dead_;
  std::map<int64_t, Round> rounds_;
  std::map<std::tuple<int64_t, int64_t, int64_t>, Mailbox> mailboxes_;  // (from, to, tag)
  std::multimap<Clock::time_point, std::function<void()>> jobs_;
  int64_t unended_ = 0;
  int64_t ended_ = 0;
  std::string next_failure_;
  bool stalled_ = false;
  bool stopping_ = false;
  std::thread mover_;
};

namespace {

class LoopbackBackend final : public c10d::Backend {
 public:
  LoopbackBackend(std::shared_ptr<LoopbackGroup::Fabric> fabric, int64_t rank, int64_t size)
      : c10d::Backend(static_cast<int>(rank), static_cast<int>(size)), fabric_(std::move(fabric)) {}

  const std::string getBackendName() const override { return "loopback"; }

  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& target, at::Tensor& source,
                                               std::vector<int64_t>& target_sizes,
                                               std::vector<int64_t>& source_sizes,
                                               const c10d::AllToAllOptions&) override {
    poison(target);
    Part part;
    part.what = What::kAllToAll;
    part.send = segments(source, source_sizes, getSize());
    part.recv = segments(target, target_sizes, getSize());
    return fabric_->collective(getRank(), std::move(part));
  }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    Part part;
    part.what = options.reduceOp == c10d::ReduceOp::MIN ? What::kMin : What::kSum;
    part.reduced = tensors.at(0);
    return fabric_->collective(getRank(), std::move(part));
  }

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    return fabric_->point(getRank(), to, tag, tensors.at(0), true);
  }

  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from,
                                      int tag) override {
    poison(tensors.at(0));
    return fabric_->point(from, getRank(), tag, tensors.at(0), false);
  }

 private:
  std::shared_ptr<LoopbackGroup::Fabric> fabric_;
};

}  // namespace

struct LoopbackGroup::Groups {
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> of_rank;
};

LoopbackGroup::LoopbackGroup(const std::string& name, int64_t size, LoopbackOptions options)
    : name_(name),
      size_(size),
      fabric_(std::make_shared<Fabric>(size, options)),
      groups_(std::make_unique<Groups>()) {
  for (int64_t rank = 0; rank < size; ++rank) {
    auto group =
        c10::make_intrusive<c10d::ProcessGroup>(static_cast<int>(rank), static_cast<int>(size));
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                      c10::make_intrusive<LoopbackBackend>(fabric_, rank, size));
    group->setGroupName(name_of(rank));
    c10d::register_process_group(name_of(rank), group);
    groups_->of_rank.push_back(std::move(group));
  }
}

LoopbackGroup::~LoopbackGroup() {
  for (int64_t rank = 0; rank < size_; ++rank) c10d::unregister_process_group(name_of(rank));
}

std::string LoopbackGroup::name_of(int64_t rank) const {
  return name_ + "." + std::to_string(rank);
}

void LoopbackGroup::stall(bool stalled) { fabric_->stall(stalled); }
void LoopbackGroup::fail_next(const std::string& cause) { fabric_->fail_next(cause); }
void LoopbackGroup::kill(int64_t rank) { fabric_->kill(rank); }
int64_t LoopbackGroup::unended() const { return fabric_->unended(); }
int64_t LoopbackGroup::ended() const { return fabric_->ended(); }

}  // namespace bagualu
