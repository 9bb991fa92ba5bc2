#include "bagualu/cli/simulate_perfetto.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <set>
#include <tuple>
#include <utility>

#include "bagualu/base/json.h"
#include "bagualu/cli/simulate_detail.h"

namespace bagualu {
namespace {

/// Microseconds, as the format asks, to the nanosecond.
std::string us(int64_t ns) { return fmt::format("{}.{:03}", ns / 1000, ns % 1000); }

std::string json_text(std::string_view text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

constexpr int kLanesPerStream = 100;
int track_of(int stream, int lane) {
  return 1 + kLanesPerStream * stream + std::min(lane, kLanesPerStream - 1);
}

}  // namespace

/// Every event gets the first lane of its stream that is free.
std::vector<SimulatePerfetto::Placed> SimulatePerfetto::in_lanes(
    const std::vector<SimTraceEvent>& events) {
  std::vector<Placed> placed;
  for (const SimTraceEvent& event : events) placed.push_back({&event, 0});
  std::stable_sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
    return std::tie(a.event->start_ns, a.event->end_ns) <
           std::tie(b.event->start_ns, b.event->end_ns);
  });
  std::array<std::vector<int64_t>, kSimStreams> free_ns;
  for (Placed& at : placed) {
    std::vector<int64_t>& lanes = free_ns[static_cast<size_t>(at.event->stream)];
    const auto lane = std::find_if(lanes.begin(), lanes.end(),
                                   [&](int64_t ns) { return ns <= at.event->start_ns; });
    at.lane = static_cast<int>(lane - lanes.begin());
    if (lane == lanes.end()) {
      lanes.push_back(at.event->end_ns);
    } else {
      *lane = at.event->end_ns;
    }
  }
  return placed;
}

SimulatePerfetto::SimulatePerfetto()
    : text_(
          "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"kind\":\"simulated\"},"
          "\"traceEvents\":[") {}

void SimulatePerfetto::add(const std::string& label, const TracedIteration& iteration) {
  std::set<int64_t> seen;  // the hottest rank is often the heaviest of its stage, too
  for (const TracedRank& rank : iteration.ranks) {
    if (seen.insert(rank.rank).second) add_rank(label, iteration, rank);
  }
}

std::string SimulatePerfetto::take() { return std::move(text_) + "\n]}\n"; }

void SimulatePerfetto::name(std::string_view kind, int64_t track, const std::string& text) {
  text_ += first_ ? "\n" : ",\n";
  first_ = false;
  fmt::format_to(std::back_inserter(text_),
                 "{{\"ph\":\"M\",\"pid\":{},\"tid\":{},\"name\":\"{}\",\"args\":{{\"name\":{}}}}}",
                 process_, track, kind, json_text(text));
}

void SimulatePerfetto::add_rank(const std::string& label, const TracedIteration& iteration,
                                const TracedRank& rank) {
  ++process_;
  name("process_name", 0,
       fmt::format("{}, rank {} (stage {}), iteration {}, simulated", label, rank.rank,
                   rank.place.pp_rank, iteration.iteration));
  const std::vector<Placed> placed = in_lanes(rank.events);
  std::array<int, kSimStreams> lanes = {};
  lanes.fill(1);
  for (const Placed& at : placed) {
    int& count = lanes[static_cast<size_t>(at.event->stream)];
    count = std::max(count, at.lane + 1);
  }
  for (int s = 0; s < kSimStreams; ++s) {
    const std::string stream(sim_stream_name(static_cast<SimStream>(s)));
    for (int lane = 0; lane < lanes[static_cast<size_t>(s)]; ++lane) {
      name("thread_name", track_of(s, lane),
           lane == 0 ? stream : fmt::format("{} {}", stream, lane + 1));
    }
  }
  for (const Placed& at : placed) add_event(rank, at);
  add_counter(rank);
}

void SimulatePerfetto::add_event(const TracedRank& rank, const Placed& at) {
  const SimTraceEvent& event = *at.event;
  const std::string_view words = rank.name_of(event);
  const std::string& kind = stream_kinds()[static_cast<size_t>(stream_kind(event.stream, words))];
  fmt::format_to(
      std::back_inserter(text_),
      ",\n{{\"ph\":\"X\",\"pid\":{},\"tid\":{},\"ts\":{},\"dur\":{},\"name\":{},\"cat\":{},"
      "\"args\":{{\"stage\":{},\"microbatch\":{}}}}}",
      process_, track_of(static_cast<int>(event.stream), at.lane), us(event.start_ns),
      us(event.end_ns - event.start_ns), json_text(words), json_text(kind), event.stage,
      event.microbatch);
}

/// Bytes change with the instructions alone, in their order.
void SimulatePerfetto::add_counter(const TracedRank& rank) {
  const std::string counter = json_text(fmt::format("live bytes, rank {}", rank.rank));
  int64_t bytes = -1;
  for (const SimTraceEvent& event : rank.events) {
    if (event.stream != SimStream::kCompute || event.live_bytes == bytes) continue;
    bytes = event.live_bytes;
    fmt::format_to(std::back_inserter(text_),
                   ",\n{{\"ph\":\"C\",\"pid\":{},\"name\":{},\"ts\":{},\"args\":{{\"bytes\":{}}}}}",
                   process_, counter, us(event.end_ns), bytes);
  }
}

}  // namespace bagualu
