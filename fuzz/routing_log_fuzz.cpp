// Routing logs: any bytes give a sorted trace with sane statistics, or InvalidInput; and the trace
// is read back from its own JSON lines.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <tuple>

#include "bagualu/base/error.h"
#include "bagualu/model/routing_loads.h"
#include "bagualu/model/routing_log.h"
#include "bagualu/model/routing_stats.h"

namespace bagualu {
namespace {

RoutingTrace read(std::string_view text) {
  RoutingLogReader reader;
  reader.begin_file("log");
  TextLine line;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    line = {text.substr(0, end), line.number + 1, end != std::string_view::npos, false};
    reader.add(line);
    text.remove_prefix(std::min(text.size(), line.text.size() + 1));
  }
  reader.end_file();
  return reader.finish();
}

auto key(const RoutedRecord& r) { return std::tie(r.step, r.microbatch, r.layer, r.rank); }

void check_trace(const RoutingTrace& trace) {
  BGL_CHECK(trace.used_lines <= trace.lines);
  for (size_t i = 0; i < trace.records.size(); ++i) {
    const RoutedRecord& r = trace.records[i];
    BGL_CHECK(r.step >= 0 && r.microbatch >= -1 && r.layer >= 0 && r.rank >= 0 && r.tokens >= 0);
    BGL_CHECK(i == 0 || key(trace.records[i - 1]) < key(r), i);
  }
  for (const LeftOut& entry : trace.left_out) {
    BGL_CHECK(entry.count > 0 && !entry.places.empty());
  }
}

void check_statistics(const RoutingTrace& trace) {
  const RoutingStats stats = routing_stats(trace);
  for (const IterationImbalance& i : stats.series) {
    BGL_CHECK(std::isfinite(i.factor) && i.factor > 0.999, i.factor);
  }
  for (const auto& value : stats.autocorrelation) {
    BGL_CHECK(!value || std::abs(*value) <= 1.000001, value.value_or(0));
  }
  if (trace.records.empty()) return;
  for (const RankLoads& loads : rank_loads(trace, trace.records.front().rank)) {
    const RoutedLoads routed = routed_loads(loads, 8, trace.first_layer);
    for (const double factor : routed.by_layer) BGL_CHECK(std::isfinite(factor) && factor >= 0);
  }
}

void check_written(const RoutingTrace& trace) {
  const bool any_over = std::any_of(trace.records.begin(), trace.records.end(),
                                    [](const RoutedRecord& r) { return r.tokens > kMaxTokens; });
  if (trace.records.empty() || any_over) return;
  const RoutingTrace again = read(to_json_lines(trace));
  BGL_CHECK(again.left_out.empty() && again.per_expert == trace.per_expert);
  if (!trace.per_expert) {
    BGL_CHECK(again.records == trace.records && again.first_layer == trace.first_layer);
  }
}

}  // namespace
}  // namespace bagualu

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace bagualu;  // NOLINT: one function
  try {
    const RoutingTrace trace = read({reinterpret_cast<const char*>(data), size});
    check_trace(trace);
    check_statistics(trace);
    check_written(trace);
  } catch (const InvalidInput& error) {
    BGL_CHECK(error.where() == "log" && !error.field().empty(), error.what());
  }
  return 0;
}
