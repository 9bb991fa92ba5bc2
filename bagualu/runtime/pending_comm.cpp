#include "bagualu/runtime/pending_comm.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/runtime/communicator_state.h"
#include "bagualu/runtime/deadline.h"

namespace bagualu {
namespace {

constexpr int64_t kNsPerMs = 1'000'000;

// c10d counts in whole milliseconds, and 0 stands for its own timeout.
std::chrono::milliseconds whole_ms(int64_t ns) {
  return std::chrono::milliseconds(std::max<int64_t>((ns + kNsPerMs - 1) / kNsPerMs, 1));
}

// A backend whose own timeout ended it says so in words only.
bool is_timeout(const std::string& text) {
  return text.find("imed out") != std::string::npos || text.find("imeout") != std::string::npos;
}

}  // namespace

PendingComm::PendingComm() = default;
PendingComm::PendingComm(std::unique_ptr<State> state) : state_(std::move(state)) {}
PendingComm::PendingComm(PendingComm&&) noexcept = default;

PendingComm& PendingComm::operator=(PendingComm&& other) noexcept {
  abandon();
  state_ = std::move(other.state_);
  return *this;
}

PendingComm::~PendingComm() { abandon(); }

bool PendingComm::pending() const {
  return state_ != nullptr && (state_->work != nullptr || state_->local != nullptr);
}

const std::string& PendingComm::label() const {
  BGL_CHECK(state_ != nullptr, "nothing was issued");
  return state_->label;
}

const CommTimes& PendingComm::times() const {
  BGL_CHECK(state_ != nullptr, "nothing was issued");
  return state_->times;
}

bool PendingComm::query() const {
  if (!pending()) return true;
  if (state_->local != nullptr) return state_->local->delivered;
  return state_->work->isCompleted() && steady_now_ns() >= state_->link_done_ns;
}

void PendingComm::wait() {
  if (pending()) wait(state_->owner->options.deadline_ns);
}

void PendingComm::wait(int64_t timeout_ns) {
  if (!pending()) return;
  State& state = *state_;
  state.times.wait_begin_ns = steady_now_ns();
  const auto stop = [&state] {
    state.times.waited_until_ns = steady_now_ns();
    state.owner->blocked_ns += state.times.waited_until_ns - state.times.wait_begin_ns;
  };
  try {
    wait_for_backend(timeout_ns);
  } catch (...) {
    stop();
    throw;
  }
  const int64_t deadline_ns = state.times.wait_begin_ns + timeout_ns;
  const int64_t until_ns = std::min(state.link_done_ns, deadline_ns);
  const int64_t left_ns = until_ns - steady_now_ns();
  if (left_ns > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(left_ns));
  stop();
  if (until_ns < state.link_done_ns) throw DeadlineExceeded(state.label, state.label, timeout_ns);
  const int64_t ended_ns = state.ended_ns ? state.ended_ns->load() : 0;
  state.times.done_ns =
      ended_ns > 0 ? std::max(ended_ns, state.link_done_ns) : state.times.waited_until_ns;
  state.work.reset();
}

void PendingComm::wait_for_backend(int64_t timeout_ns) {
  State& state = *state_;
  if (state.local != nullptr) {
    BGL_CHECK(state.local->delivered, state.label, "its other half is to come from this thread");
    state.local.reset();
    return;
  }
  std::string failure;
  try {
    // With a timeout a device's work would be waited for by this thread instead of by its stream.
    if (state.work->wait(state.on_cpu ? whole_ms(timeout_ns) : kNoTimeout)) return;
    failure = "aborted";
  } catch (const c10::OutOfMemoryError&) {
    state.work.reset();
    throw;
  } catch (const std::exception& error) {
    failure = error.what();
  }
  const int64_t waited_ns = steady_now_ns() - state.times.wait_begin_ns;
  if (waited_ns >= timeout_ns) throw DeadlineExceeded(state.label, state.label, timeout_ns);
  if (is_timeout(failure)) {  // the backend's own, which runs from the issue
    throw DeadlineExceeded(state.label, state.label, steady_now_ns() - state.times.issued_ns);
  }
  state.work.reset();
  throw PeerLost(state.label + " failed: " + failure);
}

void PendingComm::abandon() noexcept {
  if (!pending()) return;
  if (state_->local != nullptr) {
    state_->local->withdrawn = true;
    state_->local.reset();
    return;
  }
  const auto work = std::move(state_->work);
  if (state_->point_to_point) {
    if (work->isCompleted()) return;
    // Gloo lets go of the buffer when the work item is gone. The peer still counts on it.
    state_->owner->broken_by = state_->label;
    try {
      work->abort();
    } catch (...) {
      // A backend that cannot: it has nothing more to give up.
    }
    return;
  }
  try {
    work->wait();
  } catch (...) {
    // It ended, which is all that freeing its memory needs.
  }
}

}  // namespace bagualu
