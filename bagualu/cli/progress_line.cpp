#include "bagualu/cli/progress_line.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <iostream>

namespace bagualu {
namespace {

constexpr double kRefreshSeconds = 0.1;
constexpr double kGuessSeconds = 0.5;  // before that the rest is not guessed

double steady_seconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

}  // namespace

std::string duration_text(double seconds) {
  const auto whole = static_cast<int64_t>(std::ceil(seconds));
  if (whole < 60) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return fmt::format("{} h {} min", whole / 3600, whole % 3600 / 60);
}

ProgressLine::ProgressLine(std::ostream& out, bool live, double total_work, Clock clock)
    : out_(out),
      live_(live),
      total_work_(total_work),
      clock_(clock ? std::move(clock) : steady_seconds),
      start_(clock_()),
      shown_(start_ - 1) {}

ProgressLine::~ProgressLine() { clear(); }

void ProgressLine::show(const std::string& what, double done_work) {
  if (!live_) return;
  const double now = clock_();
  if (now - shown_ < kRefreshSeconds) return;
  shown_ = now;
  std::string line = what;
  const double spent = now - start_;
  if (spent >= kGuessSeconds && done_work > 0) {
    const double rest = spent * std::max(0.0, total_work_ - done_work) / done_work;
    line += fmt::format(", about {} left", duration_text(rest));
  }
  out_ << '\r' << fmt::format("{:<{}}", line, width_) << std::flush;
  width_ = line.size();
}

void ProgressLine::clear() {
  if (width_ == 0) return;
  out_ << '\r' << std::string(width_, ' ') << '\r' << std::flush;
  width_ = 0;
}

bool is_terminal(const std::ostream& err) {
  return &err == &std::cerr && isatty(STDERR_FILENO) == 1;
}

}  // namespace bagualu
