// What the plain bench programs share: a figure as a line of JSON, repeated measurements, quick set
// or full set.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/base/json.h"

namespace bagualu {

inline double us(int64_t ns) { return static_cast<double>(ns) / 1e3; }

inline int64_t clock_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

/// Of this thread: other work on the machine does not count.
inline int64_t cpu_ns() { return clock_ns(CLOCK_THREAD_CPUTIME_ID); }

/// Of all threads.
inline int64_t process_cpu_ns() { return clock_ns(CLOCK_PROCESS_CPUTIME_ID); }

inline int64_t wall_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

/// Nearest rank. Requires: not empty.
inline int64_t quantile(std::vector<int64_t> values, double fraction) {
  BGL_CHECK(!values.empty(), "nothing was measured");
  const auto at = std::min(values.size() - 1,
                           static_cast<size_t>(fraction * static_cast<double>(values.size())));
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(at), values.end());
  return values[at];
}

/// Units: seconds.
struct Spread {
  double median = 0, least = 0, worst = 0;
};

/// Runs once to touch memory, then `repeats` times by the clock `now_ns`.
template <class Run>
Spread measure(int repeats, int64_t (*now_ns)(), Run&& run) {
  run();
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    const int64_t begin = now_ns();
    run();
    times.push_back(static_cast<double>(now_ns() - begin) * 1e-9);
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front(), times.back()};
}

/// {"figure","unit","value","kind":"measured", and `more`}
inline void print(const std::string& figure, const char* unit, double value,
                  const Json& more = Json::object()) {
  Json line = {{"figure", figure}, {"unit", unit}, {"value", value}, {"kind", "measured"}};
  line.update(more);
  std::puts(line.dump().c_str());
}

/// scripts/bench passes Google Benchmark's flag to every program: half a second and more is the
/// full set. Any other argument ends the program with its usage.
inline bool is_quick(int argc, char** argv, const char* program) {
  bool quick = true;
  for (int i = 1; i < argc; ++i) {
    constexpr const char* kMinTime = "--benchmark_min_time=";
    if (std::strncmp(argv[i], kMinTime, std::strlen(kMinTime)) != 0) {
      std::fprintf(stderr, "usage: %s [--benchmark_min_time=SECONDS]\n", program);
      std::exit(2);
    }
    quick = std::atof(argv[i] + std::strlen(kMinTime)) < 0.5;
  }
  return quick;
}

}  // namespace bagualu
