// Text and JSON forms of the statistics of a routing trace.

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "bagualu/cli/trace_command.h"

namespace bagualu {
namespace {

constexpr int64_t kFormatVersion = 1;
constexpr size_t kShown = 5;  // hottest layers and ranks of the table

/// Six digits: differences below them are noise of the summation.
double rounded(double value) { return std::stod(fmt::format("{:.6g}", value)); }

Json summary_json(const FactorSummary& s) {
  Json above = Json::object();
  for (size_t i = 0; i < kImbalanceMarks.size(); ++i) {
    above[fmt::format("{:.1f}", kImbalanceMarks[i])] = rounded(s.above_fraction[i]);
  }
  return {{"count", s.count},       {"mean", rounded(s.mean)}, {"p50", rounded(s.p50)},
          {"p90", rounded(s.p90)},  {"p99", rounded(s.p99)},   {"largest", rounded(s.largest)},
          {"above_fraction", above}};
}

std::string percent(double fraction) { return fmt::format("{:.1f} %", 100 * fraction); }

void line(std::ostream& out, std::string_view label, std::string_view value) {
  out << fmt::format("  {:<34}{}\n", label, value);
}

void summary_lines(std::ostream& out, std::string_view title, const FactorSummary& s) {
  out << fmt::format("  {:<24}{:>7}{:>7}{:>7}{:>7}{:>9}", title, fmt::format("{:.2f}", s.mean),
                     fmt::format("{:.2f}", s.p50), fmt::format("{:.2f}", s.p90),
                     fmt::format("{:.2f}", s.p99), fmt::format("{:.2f}", s.largest));
  for (const double fraction : s.above_fraction) out << fmt::format("{:>10}", percent(fraction));
  out << '\n';
}

template <class Entry, class Less>
std::vector<Entry> hottest(std::vector<Entry> entries, Less less) {
  std::stable_sort(entries.begin(), entries.end(), less);
  if (entries.size() > kShown) entries.resize(kShown);
  return entries;
}

std::string_view unit_name(const RoutingTrace& trace) {
  return trace.per_expert ? "expert" : "rank";
}

void print_layers(const RoutingTrace& trace, const RoutingStats& stats, std::ostream& out) {
  out << fmt::format("\n{:<26}{:>7}{:>7}{:>7}{:>9}{:>22}\n", "hottest layers", "mean", "p50", "p99",
                     "largest", "hottest layer in");
  const auto by_mean = [](const LayerImbalance& a, const LayerImbalance& b) {
    return a.iterations.mean > b.iterations.mean;
  };
  for (const LayerImbalance& layer : hottest(stats.layers, by_mean)) {
    out << fmt::format("  {:<24}{:>7.2f}{:>7.2f}{:>7.2f}{:>9.2f}{:>22}\n",
                       fmt::format("layer {}", layer.layer), layer.iterations.mean,
                       layer.iterations.p50, layer.iterations.p99, layer.iterations.largest,
                       percent(layer.hottest_fraction));
  }
  const std::string_view unit = unit_name(trace);
  out << fmt::format("\n{:<26}{:>7}{:>23}{:>22}\n", fmt::format("hottest {}s", unit), "mean",
                     "largest", fmt::format("hottest {} in", unit));
  const auto by_share = [](const RankImbalance& a, const RankImbalance& b) {
    return a.hottest_fraction > b.hottest_fraction;
  };
  for (const RankImbalance& rank : hottest(stats.ranks, by_share)) {
    out << fmt::format("  {:<24}{:>7.2f}{:>23.2f}{:>22}\n", fmt::format("{} {}", unit, rank.rank),
                       rank.mean, rank.largest, percent(rank.hottest_fraction));
  }
}

void print_time(const RoutingStats& stats, std::ostream& out) {
  out << "\nover time\n";
  std::string text;
  for (size_t lag = 0; lag < stats.autocorrelation.size(); ++lag) {
    const auto& value = stats.autocorrelation[lag];
    text += value ? fmt::format("{:>7.2f}", *value) : fmt::format("{:>7}", "-");
  }
  line(out, "autocorrelation, lag 1 to 8", text);
  text.clear();
  for (const double mean : stats.by_tenth) text += fmt::format("{:>7.2f}", mean);
  line(out,
       fmt::format("mean of each {} of the run", stats.by_tenth.size() == 10 ? "tenth" : "step"),
       text);
  const ColdStart& cold = stats.cold_start;
  line(out, "cold start",
       cold.present ? fmt::format("yes: {:.2f} at first, {:.2f} after {} iterations", cold.start,
                                  cold.settled, cold.iterations)
                    : "no");
}

void print_left_out(const TraceRequest& request, const RoutingTrace& trace,
                    const RoutingStats& stats, std::ostream& out) {
  out << "\nleft out\n";
  bool any = false;
  const auto note = [&](std::string_view label, std::string_view value) {
    line(out, label, value);
    any = true;
  };
  for (const LeftOut& entry : trace.left_out) {
    note(fmt::format("{} records or lines", left_out_name(entry.reason)),
         fmt::format("{:<8}first at {}", entry.count, fmt::join(entry.places, ", ")));
  }
  if (stats.incomplete_cells > 0) {
    note("micro-batches of a layer",
         fmt::format("{} of {}: some {}s are missing there{}", stats.incomplete_cells, stats.cells,
                     unit_name(trace), request.balanced_rows > 0 ? ", used all the same" : ""));
  }
  if (!stats.absent_ranks.empty()) {
    note(fmt::format("{}s without any line", unit_name(trace)), number_ranges(stats.absent_ranks));
  }
  const std::vector<int32_t> layers = absent_layers(trace, stats, request.layers);
  if (!layers.empty()) note("layers without any line", number_ranges(layers));
  for (const LayerImbalance& layer : stats.layers) {
    if (!trace.per_expert && request.ep > 0 && layer.ranks % request.ep != 0) {
      note(fmt::format("layer {}", layer.layer),
           fmt::format("{} ranks, no multiple of --ep {}", layer.ranks, request.ep));
    } else if (layer.ranks == 1 && request.balanced_rows == 0 && request.ep != 1) {
      note(fmt::format("layer {}", layer.layer),
           "one rank only: its factor is 1 without --balanced-rows");
    }
  }
  for (const std::string& text : trace.notes) note("note", text);
  if (!any) out << "  nothing\n";
}

}  // namespace

std::string number_ranges(const std::vector<int32_t>& numbers, size_t most) {
  std::string text;
  size_t parts = 0;
  for (size_t first = 0; first < numbers.size();) {
    if (parts == most) return text + fmt::format(" and {} more", numbers.size() - first);
    size_t last = first;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    if (parts++ > 0) text += ", ";
    text += last == first ? fmt::format("{}", numbers[first])
                          : fmt::format("{}-{}", numbers[first], numbers[last]);
    first = last + 1;
  }
  return text;
}

Json to_json(const TraceRequest& request, const RoutingTrace& trace, const RoutingStats& stats) {
  Json left_out = Json::object();
  for (const LeftOut& entry : trace.left_out) {
    left_out[std::string(left_out_name(entry.reason))] = {{"count", entry.count},
                                                          {"first", entry.places}};
  }
  Json autocorrelation = Json::array();
  for (const auto& value : stats.autocorrelation) {
    autocorrelation.push_back(value ? Json(rounded(*value)) : Json(nullptr));
  }
  Json by_tenth = Json::array();
  for (const double mean : stats.by_tenth) by_tenth.push_back(rounded(mean));
  Json layers = Json::array();
  for (const LayerImbalance& layer : stats.layers) {
    layers.push_back({{"layer", layer.layer},
                      {"ranks", layer.ranks},
                      {"imbalance", summary_json(layer.iterations)},
                      {"hottest_fraction", rounded(layer.hottest_fraction)}});
  }
  Json ranks = Json::array();
  for (const RankImbalance& rank : stats.ranks) {
    ranks.push_back({{"rank", rank.rank},
                     {"mean", rounded(rank.mean)},
                     {"largest", rounded(rank.largest)},
                     {"hottest_fraction", rounded(rank.hottest_fraction)},
                     {"missing", rank.missing}});
  }
  Json series = Json::array();
  for (const IterationImbalance& i : stats.series) {
    series.push_back(
        {{"step", i.step}, {"imbalance", rounded(i.factor)}, {"layer", i.layer}, {"rank", i.rank}});
  }
  return {
      {"type", "routing_statistics"},
      {"version", kFormatVersion},
      {"bagualu", BAGUALU_VERSION},
      {"logs", request.logs},
      {"counts", trace.per_expert ? "expert" : "rank"},
      {"ep", request.ep > 0 ? Json(request.ep) : Json(nullptr)},
      {"balanced_rows", request.balanced_rows > 0 ? Json(request.balanced_rows) : Json(nullptr)},
      {"lines", trace.lines},
      {"used_lines", trace.used_lines},
      {"records", trace.records.size()},
      {"steps", stats.steps},
      {"microbatches", stats.microbatches},
      {"first_layer", trace.first_layer},
      {"imbalance", summary_json(stats.iterations)},
      {"microbatch_imbalance", summary_json(stats.per_microbatch)},
      {"autocorrelation", autocorrelation},
      {"mean_by_tenth", by_tenth},
      {"cold_start",
       {{"present", stats.cold_start.present},
        {"iterations", stats.cold_start.iterations},
        {"start", rounded(stats.cold_start.start)},
        {"settled", rounded(stats.cold_start.settled)}}},
      {"layers", layers},
      {"ranks", ranks},
      {"absent_ranks", stats.absent_ranks},
      {"absent_layers", absent_layers(trace, stats, request.layers)},
      {"incomplete_cells", stats.incomplete_cells},
      {"cells", stats.cells},
      {"left_out", left_out},
      {"notes", trace.notes},
      {"series", series}};
}

void print_table(const TraceRequest& request, const RoutingTrace& trace, const RoutingStats& stats,
                 std::ostream& out) {
  const std::string_view unit = unit_name(trace);
  out << fmt::format(
      "{} records from {} of {} lines: {} iterations, {} micro-batches, {} layers, {} {}s\n",
      trace.records.size(), trace.used_lines, trace.lines, stats.steps, stats.microbatches,
      stats.layers.size(), stats.ranks.size(), unit);
  if (trace.per_expert) {
    out << "Counts are per expert: without --ep each expert stands for a rank.\n";
  }
  out << fmt::format("Layers count from {}, as in the log.\n\n", trace.first_layer);
  out << fmt::format("{:<26}{:>7}{:>7}{:>7}{:>7}{:>9}{:>10}{:>10}{:>10}\n",
                     fmt::format("hottest {} / mean", unit), "mean", "p50", "p90", "p99", "largest",
                     "> 1.2", "> 2.0", "> 2.6");
  summary_lines(out, "iterations", stats.iterations);
  summary_lines(out, "micro-batches", stats.per_microbatch);
  print_layers(trace, stats, out);
  print_time(stats, out);
  print_left_out(request, trace, stats, out);
}

}  // namespace bagualu
