#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <ostream>
#include <string>

namespace bagualu {

/// "42 s", "3 min 5 s", "1 h 2 min".
std::string duration_text(double seconds);

/// One line on a terminal that is rewritten: what is done, how fast, how long the rest will take.
class ProgressLine {
 public:
  using Clock = std::function<double()>;  ///< seconds, rising

  /// `live` false: nothing is written. `total_work`: of everything, in any unit.
  ProgressLine(std::ostream& out, bool live, double total_work, Clock clock = {});
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  /// `done_work` of the total; `what` is shown as it is. At most ten times a second.
  void show(const std::string& what, double done_work);
  /// Clears the line, so that others can write.
  void clear();

 private:
  std::ostream& out_;
  const bool live_;
  const double total_work_;
  const Clock clock_;
  const double start_;
  double shown_;
  size_t width_ = 0;
};

/// True if standard error is a terminal and `err` is it.
bool is_terminal(const std::ostream& err);

}  // namespace bagualu
