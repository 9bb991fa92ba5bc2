#include "bagualu/sim/job_clock.h"

#include <fmt/core.h>

#include <cmath>
#include <limits>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr double kNsPerS = 1e9;
constexpr double kSecondsPerDay = 86'400;
/// Without a checkpoint in between: then the job stands still, and so would the simulation.
constexpr int64_t kMostFailures = 10'000;

int64_t ns_of(double seconds, const char* field) {
  if (!(seconds >= 0 && seconds <= 1e9)) {
    throw InvalidInput("interruptions", field, fmt::format("{}", seconds), "0 to 1e9 seconds");
  }
  return std::llround(seconds * kNsPerS);
}

/// SplitMix64's output function, of a counter: uniform bits.
/// Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
uint64_t mixed(uint64_t seed, uint64_t counter) {
  uint64_t z = seed + (counter + 1) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

/// In (0, 1].
double uniform(uint64_t bits) { return (static_cast<double>(bits >> 11) + 1) * 0x1p-53; }

}  // namespace

JobClock::JobClock(const Interruptions& interruptions, uint64_t seed)
    : interruptions_(interruptions),
      seed_(seed),
      restart_ns_(ns_of(interruptions.restart_s, "restart_s")),
      checkpoint_ns_(ns_of(interruptions.checkpoint_s, "checkpoint_s")) {
  if (interruptions.checkpoint_interval < 1) {
    throw InvalidInput("interruptions", "checkpoint_interval",
                       fmt::format("{}", interruptions.checkpoint_interval),
                       "at least 1 iteration");
  }
  if (!(interruptions.failures_per_day >= 0)) {
    throw InvalidInput("interruptions", "failures_per_day",
                       fmt::format("{}", interruptions.failures_per_day), "0 or more");
  }
  draw_failure();
}

void JobClock::draw_failure() {
  if (interruptions_.failures_per_day == 0) {
    until_failure_ns_ = std::numeric_limits<int64_t>::max();
    return;
  }
  const double u = uniform(mixed(seed_, static_cast<uint64_t>(totals_.failures)));
  const double days = -std::log(u) / interruptions_.failures_per_day;
  // A rate near 0 gives gaps that no int64 holds; they are never reached either.
  until_failure_ns_ = std::llround(std::min(days * kSecondsPerDay * kNsPerS, 9e18));
}

bool JobClock::survives(int64_t ns) {
  if (ns <= until_failure_ns_) {
    if (interruptions_.failures_per_day > 0) until_failure_ns_ -= ns;
    totals_.wall_ns += ns;
    return true;
  }
  totals_.wall_ns += until_failure_ns_;
  totals_.lost_ns += until_failure_ns_;
  ++totals_.failures;
  draw_failure();
  if (++failures_since_checkpoint_ > kMostFailures) {
    throw InvalidInput("interruptions", "failures_per_day",
                       fmt::format("{}", interruptions_.failures_per_day),
                       "few enough that the job reaches a checkpoint: fewer, or a smaller "
                       "checkpoint_interval");
  }
  return false;
}

void JobClock::restart() {
  for (;;) {
    totals_.wall_ns += restart_ns_;
    totals_.restart_ns += restart_ns_;
    bool through = true;
    for (const int64_t ns : since_checkpoint_ns_) {
      through = survives(ns);
      if (!through) break;
      totals_.lost_ns += ns;
      ++totals_.lost_iterations;
    }
    if (through) return;
  }
}

void JobClock::complete(int64_t ns) {
  BGL_CHECK(ns >= 0, ns);
  while (!survives(ns)) restart();
  totals_.useful_ns += ns;
  ++totals_.completed;
  since_checkpoint_ns_.push_back(ns);
  if (static_cast<int64_t>(since_checkpoint_ns_.size()) < interruptions_.checkpoint_interval) {
    return;
  }
  while (!survives(checkpoint_ns_)) restart();
  totals_.checkpoint_ns += checkpoint_ns_;
  since_checkpoint_ns_.clear();
  failures_since_checkpoint_ = 0;
}

void JobClock::die(int64_t ns) {
  BGL_CHECK(ns >= 0, ns);
  while (!survives(ns)) restart();
  totals_.lost_ns += ns;
  ++totals_.ooms;
  restart();
}

bool is_kept(int64_t i, int64_t total, int64_t limit) {
  if (limit <= 0) return false;
  return i == 0 || limit >= total || i * limit / total != (i - 1) * limit / total;
}

}  // namespace bagualu
