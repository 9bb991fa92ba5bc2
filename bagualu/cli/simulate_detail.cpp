#include "bagualu/cli/simulate_detail.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr size_t kMemoryColumns = 300;  // finer than two pixels nobody can see
constexpr size_t kStreamColumns = 1000;

constexpr double kZoom = 40;  // the part of a step in which single operators can be seen

enum SpanKind {
  kSpanForward,
  kSpanBackward,
  kSpanRecompute,
  kSpanOther,
  kSpanExchange,
  kSpanMessage,
  kSpanOut,
  kSpanIn
};

double ms(int64_t ns) { return static_cast<double>(ns) / 1e6; }

bool starts_with(std::string_view text, std::string_view head) {
  return text.substr(0, head.size()) == head;
}

/// Cuts a stream's events at columns of equal width; each column is what filled most of it.
class ColumnMaker {
 public:
  ColumnMaker(double begin_ms, double end_ms)
      : begin_(begin_ms), width_((end_ms - begin_ms) / static_cast<double>(kStreamColumns)) {
    filled_.resize(kStreamColumns);
    longest_.resize(kStreamColumns);
  }

  void add(double from, double to, int kind, std::string_view name) {
    if (!(width_ > 0)) return;
    const auto first = static_cast<int64_t>(std::floor((from - begin_) / width_));
    const auto last = static_cast<int64_t>(std::floor((to - begin_) / width_));
    for (int64_t c = std::max<int64_t>(0, first);
         c <= std::min<int64_t>(last, static_cast<int64_t>(kStreamColumns) - 1); ++c) {
      const double left = begin_ + static_cast<double>(c) * width_;
      const double part = std::min(to, left + width_) - std::max(from, left);
      if (part <= 0) continue;
      const auto column = static_cast<size_t>(c);
      filled_[column][static_cast<size_t>(kind)] += part;
      if (part > longest_[column].part) longest_[column] = {part, std::string(name)};
    }
  }

  std::vector<StreamSpan> spans() const {
    std::vector<StreamSpan> spans;
    for (size_t column = 0; column < kStreamColumns; ++column) {
      const auto& kinds = filled_[column];
      const auto most = std::max_element(kinds.begin(), kinds.end());
      // Less than half busy: white, or every short operator would fill a column.
      double busy = 0;
      for (const double part : kinds) busy += part;
      if (busy < width_ / 2) continue;
      const double left = begin_ + static_cast<double>(column) * width_;
      const int kind = static_cast<int>(most - kinds.begin());
      const std::string& name = longest_[column].name;
      if (!spans.empty() && spans.back().kind == kind && spans.back().name == name &&
          left - spans.back().end_ms < width_ / 2) {
        spans.back().end_ms = left + width_;
      } else {
        spans.push_back({left, left + width_, kind, name});
      }
    }
    return spans;
  }

 private:
  struct Longest {
    double part = 0;
    std::string name;
  };
  double begin_;
  double width_;
  std::vector<std::array<double, 8>> filled_;
  std::vector<Longest> longest_;
};

/// When most bytes are alive.
double peak_ms(const TracedRank& rank) {
  const auto peak = std::max_element(
      rank.events.begin(), rank.events.end(),
      [](const SimTraceEvent& a, const SimTraceEvent& b) { return a.peak_bytes < b.peak_bytes; });
  return peak == rank.events.end() ? 0 : ms(peak->start_ns);
}

const TracedRank& hottest_of(const TracedIteration& iteration) {
  BGL_CHECK(!iteration.ranks.empty());
  return iteration.ranks.back();
}

}  // namespace

const std::vector<std::string>& stream_kinds() {
  static const std::vector<std::string> kKinds = {
      "forward",          "backward",       "recompute",   "other compute",
      "exchange of rows", "between stages", "to the host", "from the host"};
  return kKinds;
}

int stream_kind(SimStream stream, std::string_view name) {
  switch (stream) {
    case SimStream::kToHost:
      return kSpanOut;
    case SimStream::kToDevice:
      return kSpanIn;
    case SimStream::kComm:
      return kSpanExchange;
    case SimStream::kSend:
    case SimStream::kReceive:
      return kSpanMessage;
    case SimStream::kCompute:
      break;
  }
  if (starts_with(name, "forward")) return kSpanForward;
  for (const char* word : {"backward", "input_grad", "weight_grad"}) {
    if (starts_with(name, word)) return kSpanBackward;
  }
  return starts_with(name, "recompute") ? kSpanRecompute : kSpanOther;
}

MemoryLine memory_line(const TracedRank& rank) {
  MemoryLine line;
  line.pp_rank = rank.place.pp_rank;
  line.rank = rank.rank;
  line.peak_bytes = rank.peak_bytes;
  int64_t last_ns = 1;
  std::vector<const SimTraceEvent*> compute;
  for (const SimTraceEvent& event : rank.events) {
    if (event.stream != SimStream::kCompute) continue;
    compute.push_back(&event);
    last_ns = std::max(last_ns, event.end_ns);
  }
  std::vector<int64_t> highest(kMemoryColumns, -1);
  for (const SimTraceEvent* event : compute) {
    const auto column =
        static_cast<size_t>(static_cast<double>(event->end_ns) / static_cast<double>(last_ns) *
                            static_cast<double>(kMemoryColumns - 1));
    highest[column] = std::max({highest[column], event->live_bytes, event->peak_bytes});
  }
  int64_t bytes = rank.static_bytes;
  for (size_t column = 0; column < kMemoryColumns; ++column) {
    if (highest[column] >= 0) bytes = highest[column];
    line.end_ms.push_back(ms(last_ns) * static_cast<double>(column + 1) /
                          static_cast<double>(kMemoryColumns));
    line.bytes.push_back(bytes);
  }
  return line;
}

StreamPicture stream_picture(const TracedIteration& iteration, const TracedRank& rank,
                             double begin_ms, double end_ms) {
  StreamPicture picture;
  picture.iteration = iteration.iteration;
  picture.imbalance = iteration.imbalance;
  picture.died = iteration.died;
  picture.rank = rank.rank;
  picture.begin_ms = begin_ms;
  picture.end_ms = end_ms > 0 ? end_ms : ms(iteration.end_ns);
  std::vector<ColumnMaker> streams(kSimStreams, {picture.begin_ms, picture.end_ms});
  for (const SimTraceEvent& event : rank.events) {
    const std::string_view name = rank.name_of(event);
    streams[static_cast<size_t>(event.stream)].add(ms(event.start_ns), ms(event.end_ns),
                                                   stream_kind(event.stream, name), name);
  }
  for (const ColumnMaker& stream : streams) picture.streams.push_back(stream.spans());
  return picture;
}

SpikeDetail spike_detail(const Simulator& simulator, const Scenario& scenario, const SimRun& run,
                         const SimOptions& options) {
  SpikeDetail detail;
  detail.iteration = spike_of(run);
  BGL_CHECK(detail.iteration >= 0, run.policy.label);
  const TracedIteration spike =
      simulator.trace(scenario, run.policy, options, detail.iteration, {});
  detail.imbalance = spike.imbalance;
  detail.died = spike.died;
  const size_t heaviest = spike.ranks.size() - 1;
  for (size_t i = 0; i < heaviest; ++i) detail.memory.push_back(memory_line(spike.ranks[i]));
  const int64_t other = detail.iteration > 0 ? detail.iteration - 1 : 1;
  const TracedIteration before =
      simulator.trace(scenario, run.policy, options, other, {hottest_of(spike).rank});
  detail.pictures.push_back(stream_picture(before, hottest_of(before)));
  detail.pictures.push_back(stream_picture(spike, hottest_of(spike)));
  // One below the other the two are comparable only on one scale.
  const double longest = std::max(detail.pictures[0].end_ms, detail.pictures[1].end_ms);
  for (StreamPicture& picture : detail.pictures) picture.end_ms = longest;
  const double peak = peak_ms(hottest_of(spike));
  const double half = ms(spike.end_ns) / (2 * kZoom);
  detail.pictures.push_back(
      stream_picture(spike, hottest_of(spike), std::max(0.0, peak - half), peak + half));
  return detail;
}

}  // namespace bagualu
