#include "bagualu/cli/interrupt.h"

#include <array>
#include <atomic>
#include <csignal>

namespace bagualu {
namespace {

constexpr std::array<int, 2> kSignals = {SIGINT, SIGTERM};

std::atomic<int> caught = 0;
static_assert(std::atomic<int>::is_always_lock_free, "a handler may write nothing else");
std::array<struct sigaction, kSignals.size()> before;

void on_signal(int number) { caught = number; }

}  // namespace

InterruptGuard::InterruptGuard() {
  caught = 0;
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESETHAND | SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &before[i]);
    // A job started with the signal ignored (nohup) is to go on ignoring it.
    if (before[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
  }
}

InterruptGuard::~InterruptGuard() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before[i], nullptr);
  caught = 0;
}

int InterruptGuard::signal() { return caught; }

}  // namespace bagualu
