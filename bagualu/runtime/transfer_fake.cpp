#include "bagualu/runtime/transfer_fake.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr int kPoison = 0xCD;
constexpr std::array kBothDirections = {Direction::kD2H, Direction::kH2D};

int64_t deadline_from(int64_t now_ns, int64_t timeout_ns) {
  return timeout_ns > TransferEngine::kNoTimeout - now_ns ? TransferEngine::kNoTimeout
                                                          : now_ns + timeout_ns;
}

}  // namespace

FakeTransferEngine::FakeTransferEngine(FakeTransferOptions options)
    : options_(options), random_(options.seed) {
  BGL_CHECK(options_.max_delay_ns >= 0, options_.max_delay_ns);
}

FakeTransferEngine::~FakeTransferEngine() {
  for (Lane& each : lanes_) {
    each.stalled = false;
  }
  while (step(kNoTimeout)) {
  }
}

CopyTicket FakeTransferEngine::copy(Direction direction, void* dst, const void* src,
                                    int64_t size_bytes, CopyTicket after, std::string label) {
  BGL_CHECK(size_bytes >= 0, label, size_bytes);
  BGL_CHECK(size_bytes == 0 || (dst != nullptr && src != nullptr), label, size_bytes);
  const std::lock_guard lock(mutex_);
  check_issued(after);
  // Before `after` ended somebody may still read the destination.
  if (size_bytes > 0 && has_ended(after)) {
    std::memset(dst, kPoison, static_cast<size_t>(size_bytes));
  }
  Lane& to = lane(direction);
  std::uniform_int_distribution<int64_t> delay(0, options_.max_delay_ns);
  to.queue.push_back({++to.issued, dst, src, size_bytes, after, std::move(label), delay(random_),
                      now_ns_, std::exchange(to.next_failure, std::nullopt)});
  return {direction, to.issued};
}

void FakeTransferEngine::wait(CopyTicket ticket, int64_t timeout_ns) {
  const std::lock_guard lock(mutex_);
  check_issued(ticket);
  const int64_t start_ns = now_ns_;
  const int64_t deadline_ns = deadline_from(start_ns, timeout_ns);
  while (!has_ended(ticket)) {
    if (!step(deadline_ns)) {
      BGL_CHECK(deadline_ns != kNoTimeout, direction_name(ticket.direction), ticket.sequence);
      stats_.wait_ns += now_ns_ - start_ns;
      const Lane& from = lane(ticket.direction);
      const std::string& label = from.queue.at(ticket.sequence - from.ended - 1).label;
      throw DeadlineExceeded(transfer_text(ticket.direction, label), label, timeout_ns);
    }
  }
  stats_.wait_ns += now_ns_ - start_ns;
  const auto& failures = lane(ticket.direction).failures;
  if (const auto found = failures.find(ticket.sequence); found != failures.end()) {
    throw TransferFailed(found->second);
  }
}

bool FakeTransferEngine::query(CopyTicket ticket) {
  const std::lock_guard lock(mutex_);
  check_issued(ticket);
  return has_ended(ticket);
}

void FakeTransferEngine::cancel(CopyTicket ticket) noexcept {
  const std::lock_guard lock(mutex_);
  Lane& from = lane(ticket.direction);
  if (ticket.sequence > from.ended && ticket.sequence <= from.issued) {
    Job& job = from.queue[ticket.sequence - from.ended - 1];
    job.failure = "cancelled";
    job.after = {};
    job.left_ns = 0;
  }
}

TransferStats FakeTransferEngine::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void FakeTransferEngine::advance(int64_t ns) {
  const std::lock_guard lock(mutex_);
  const int64_t deadline_ns = deadline_from(now_ns_, ns);
  while (step(deadline_ns)) {
  }
  now_ns_ = deadline_ns;
}

int64_t FakeTransferEngine::now_ns() const {
  const std::lock_guard lock(mutex_);
  return now_ns_;
}

void FakeTransferEngine::stall(Direction direction, bool stalled) {
  const std::lock_guard lock(mutex_);
  lane(direction).stalled = stalled;
}

void FakeTransferEngine::fail_next(Direction direction, std::string cause) {
  const std::lock_guard lock(mutex_);
  lane(direction).next_failure = std::move(cause);
}

void FakeTransferEngine::check_issued(CopyTicket ticket) {
  BGL_CHECK(ticket.sequence <= lane(ticket.direction).issued, direction_name(ticket.direction),
            ticket.sequence);
}

bool FakeTransferEngine::can_run(Direction direction) {
  const Lane& from = lane(direction);
  if (from.queue.empty() || !has_ended(from.queue.front().after)) {
    return false;
  }
  return !from.stalled || from.queue.front().failure == "cancelled";
}

bool FakeTransferEngine::step(int64_t deadline_ns) {
  std::vector<Direction> able;
  for (const Direction direction : kBothDirections) {
    if (can_run(direction)) {
      able.push_back(direction);
    }
  }
  if (able.empty()) {
    if (deadline_ns != kNoTimeout) {
      now_ns_ = deadline_ns;
    }
    return false;
  }
  const Direction chosen = able[random_() % able.size()];
  Job& job = lane(chosen).queue.front();
  const int64_t spent_ns = std::min(job.left_ns, deadline_ns - now_ns_);
  now_ns_ += spent_ns;
  job.left_ns -= spent_ns;
  stats_.busy_ns[static_cast<size_t>(chosen)] += spent_ns;
  if (job.left_ns > 0) {
    return false;
  }
  end_front(chosen);
  return true;
}

void FakeTransferEngine::end_front(Direction direction) {
  Lane& from = lane(direction);
  Job& job = from.queue.front();
  const auto& failures = lane(job.after.direction).failures;
  if (const auto found = failures.find(job.after.sequence); found != failures.end()) {
    job.failure = found->second;
  }
  if (job.failure) {
    from.failures.emplace(job.sequence, transfer_failure_text(direction, job.label, *job.failure));
  } else {
    if (job.size_bytes > 0) {
      std::memcpy(job.dst, job.src, static_cast<size_t>(job.size_bytes));
    }
    stats_.copied_bytes[static_cast<size_t>(direction)] += job.size_bytes;
  }
  // Its delay is all of its time: it starts when the one before it ended.
  record({{direction, job.sequence},
          job.size_bytes,
          job.issued_ns,
          std::max(job.issued_ns, from.last_end_ns),
          now_ns_});
  from.last_end_ns = now_ns_;
  from.queue.pop_front();
  ++from.ended;
}

}  // namespace bagualu
