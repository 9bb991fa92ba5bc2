#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/cli/simulate_trace.h"

namespace bagualu {

/// Bytes of a rank over a step, thinned for a picture.
struct MemoryLine {
  int pp_rank = 0;
  int64_t rank = 0;
  int64_t peak_bytes = 0;
  std::vector<double> end_ms;  ///< of each part of the step, rising
  std::vector<int64_t> bytes;  ///< highest in it
};

/// What a stream did, thinned: where spans are too short to be seen, the longest stands for all.
struct StreamSpan {
  double begin_ms = 0;
  double end_ms = 0;
  int kind = 0;  ///< of stream_kinds()
  std::string name;
};

/// One rank in one iteration.
struct StreamPicture {
  int64_t iteration = 0;
  double imbalance = 1;
  int64_t rank = 0;
  double begin_ms = 0;  ///< of the part that is drawn
  double end_ms = 0;
  bool died = false;
  std::vector<std::vector<StreamSpan>> streams;  ///< by SimStream
};

/// The most uneven iteration of a run in pictures.
struct SpikeDetail {
  int64_t iteration = 0;
  double imbalance = 1;
  bool died = false;
  std::vector<MemoryLine> memory;  ///< by pipeline rank: its heaviest rank
  std::vector<StreamPicture>
      pictures;  ///< of the hottest rank: another iteration, the spike, its peak
};

/// Colours of the streams' pictures, at most eight.
const std::vector<std::string>& stream_kinds();
int stream_kind(SimStream stream, std::string_view name);

MemoryLine memory_line(const TracedRank& rank);
/// The part of the step between the two times; the whole of it if end_ms is 0.
StreamPicture stream_picture(const TracedIteration& iteration, const TracedRank& rank,
                             double begin_ms = 0, double end_ms = 0);

/// Runs the spike, and the iteration before it (after it, if it is the first).
/// Requires: the run has a series.
SpikeDetail spike_detail(const Simulator& simulator, const Scenario& scenario, const SimRun& run,
                         const SimOptions& options);

}  // namespace bagualu
