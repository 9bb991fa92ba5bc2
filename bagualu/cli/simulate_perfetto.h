#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/cli/simulate_trace.h"

namespace bagualu {

/// A Chrome trace (JSON) for ui.perfetto.dev or chrome://tracing: of every rank a process with a
/// track per stream and a counter of live bytes. A track whose events run side by side (messages to
/// two neighbours) is split into lanes: slices of one must nest. Events have the fields of `bagualu
/// report --perfetto`.
class SimulatePerfetto {
 public:
  SimulatePerfetto();
  /// All ranks of an iteration; `label` stands before their numbers.
  void add(const std::string& label, const TracedIteration& iteration);
  /// The file; once.
  std::string take();

 private:
  struct Placed {
    const SimTraceEvent* event;
    int lane;
  };
  static std::vector<Placed> in_lanes(const std::vector<SimTraceEvent>& events);

  void add_rank(const std::string& label, const TracedIteration& iteration, const TracedRank& rank);
  void add_event(const TracedRank& rank, const Placed& at);
  void add_counter(const TracedRank& rank);
  void name(std::string_view kind, int64_t track, const std::string& text);

  std::string text_;
  int64_t process_ = 0;
  bool first_ = true;
};

}  // namespace bagualu
