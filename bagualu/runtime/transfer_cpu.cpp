#include "bagualu/runtime/transfer_cpu.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <utility>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::array kBothDirections = {Direction::kD2H, Direction::kH2D};

int64_t ns_of(Clock::time_point at) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}

int64_t ns_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

}  // namespace

CpuTransferEngine::CpuTransferEngine(CpuTransferOptions options) : options_(std::move(options)) {
  BGL_CHECK(options_.chunk_bytes > 0, options_.chunk_bytes);
  if (!options_.copy_chunk) {
    options_.copy_chunk = [](void* dst, const void* src, size_t n) { std::memcpy(dst, src, n); };
  }
  for (const Direction direction : kBothDirections) {
    lane(direction).worker = std::thread([this, direction] { work(direction); });
  }
}

CpuTransferEngine::~CpuTransferEngine() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  for (Lane& each : lanes_) {
    each.work.notify_one();
  }
  for (Lane& each : lanes_) {
    each.worker.join();
  }
}

CopyTicket CpuTransferEngine::copy(Direction direction, void* dst, const void* src,
                                   int64_t size_bytes, CopyTicket after, std::string label) {
  BGL_CHECK(size_bytes >= 0, label, size_bytes);
  BGL_CHECK(size_bytes == 0 || (dst != nullptr && src != nullptr), label, size_bytes);
  const std::lock_guard lock(mutex_);
  check_issued(after);
  Lane& to = lane(direction);
  to.queue.push_back({to.issued + 1, dst, src, size_bytes, after, std::move(label), false,
                      ns_of(Clock::now()), 0});
  ++to.issued;
  to.work.notify_one();
  return {direction, to.issued};
}

void CpuTransferEngine::wait(CopyTicket ticket, int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  check_issued(ticket);
  const auto done = [&] { return has_ended(ticket); };
  if (!done()) {
    const auto start = Clock::now();
    bool in_time = true;
    // A deadline beyond the clock's range would wrap around into the past.
    if (timeout_ns >= std::numeric_limits<int64_t>::max() / 4) {
      ended_.wait(lock, done);
    } else {
      in_time = ended_.wait_until(lock, start + std::chrono::nanoseconds(timeout_ns), done);
    }
    stats_.wait_ns += ns_since(start);
    if (!in_time) {
      const Lane& from = lane(ticket.direction);
      const auto& job = from.queue.at(ticket.sequence - from.ended - 1);
      throw DeadlineExceeded(transfer_text(ticket.direction, job.label), job.label, timeout_ns);
    }
  }
  if (const std::string* cause = failure(ticket)) {
    throw TransferFailed(*cause);
  }
}

bool CpuTransferEngine::query(CopyTicket ticket) {
  const std::lock_guard lock(mutex_);
  check_issued(ticket);
  return has_ended(ticket);
}

void CpuTransferEngine::cancel(CopyTicket ticket) noexcept {
  const std::lock_guard lock(mutex_);
  Lane& from = lane(ticket.direction);
  if (ticket.sequence > from.ended && ticket.sequence <= from.issued) {
    from.queue[ticket.sequence - from.ended - 1].cancelled = true;
    ended_.notify_all();
  }
}

TransferStats CpuTransferEngine::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void CpuTransferEngine::work(Direction direction) {
  Lane& mine = lane(direction);
  std::unique_lock lock(mutex_);
  while (true) {
    mine.work.wait(lock, [&] { return stopping_ || !mine.queue.empty(); });
    if (mine.queue.empty()) {
      return;
    }
    // References into a deque survive push_back, and only this thread pops.
    Job& job = mine.queue.front();
    std::string cause = run(direction, job, lock);
    if (cause.empty()) {
      stats_.copied_bytes[static_cast<size_t>(direction)] += job.size_bytes;
    } else {
      mine.failures.emplace(job.sequence, transfer_failure_text(direction, job.label, cause));
    }
    record({{direction, job.sequence},
            job.size_bytes,
            job.issued_ns,
            job.begin_ns,
            ns_of(Clock::now())});
    mine.queue.pop_front();
    ++mine.ended;
    ended_.notify_all();
  }
}

std::string CpuTransferEngine::run(Direction direction, Job& job,
                                   std::unique_lock<std::mutex>& lock) {
  ended_.wait(lock, [&] { return job.cancelled || has_ended(job.after); });
  job.begin_ns = ns_of(Clock::now());
  if (job.cancelled) {
    return "cancelled";
  }
  if (const std::string* cause = failure(job.after)) {
    return *cause;
  }
  std::string cause;
  lock.unlock();
  const auto start = Clock::now();
  try {
    move_bytes(job);
  } catch (const std::exception& error) {
    cause = error.what();
  } catch (...) {
    cause = "unknown exception";
  }
  const int64_t busy_ns = ns_since(start);
  lock.lock();
  stats_.busy_ns[static_cast<size_t>(direction)] += busy_ns;
  return cause;
}

void CpuTransferEngine::move_bytes(const Job& job) {
  auto* dst = static_cast<std::byte*>(job.dst);
  const auto* src = static_cast<const std::byte*>(job.src);
  for (int64_t done = 0; done < job.size_bytes; done += options_.chunk_bytes) {
    if (is_cancelled(job)) {
      throw TransferFailed("cancelled");
    }
    const int64_t chunk = std::min(options_.chunk_bytes, job.size_bytes - done);
    options_.copy_chunk(dst + done, src + done, static_cast<size_t>(chunk));
  }
}

bool CpuTransferEngine::is_cancelled(const Job& job) const {
  const std::lock_guard lock(mutex_);
  return job.cancelled;
}

bool CpuTransferEngine::has_ended(CopyTicket ticket) {
  return ticket.sequence <= lane(ticket.direction).ended;
}

const std::string* CpuTransferEngine::failure(CopyTicket ticket) {
  const auto& failures = lane(ticket.direction).failures;
  const auto found = failures.find(ticket.sequence);
  return found == failures.end() ? nullptr : &found->second;
}

void CpuTransferEngine::check_issued(CopyTicket ticket) {
  BGL_CHECK(ticket.sequence <= lane(ticket.direction).issued, direction_name(ticket.direction),
            ticket.sequence);
}

}  // namespace bagualu
