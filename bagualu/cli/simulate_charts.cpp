#include "bagualu/cli/simulate_charts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/cli/chart_axes.h"
#include "bagualu/cli/page_parts.h"

namespace bagualu {
namespace {

constexpr double kWide = 1160;
constexpr double kHalf = 560;
constexpr size_t kImbalanceColumns = 1000;

void text(std::string* svg, double x, double y, const char* anchor, const std::string& words,
          const char* classes = "axis") {
  svg_add(svg, "<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n",
          classes, x, y, anchor, escape_html(words));
}

void line(std::string* svg, const char* classes, double x1, double y1, double x2, double y2) {
  svg_add(svg, "<line class=\"{}\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n",
          classes, x1, x2, y1, y2);
}

/// The highest point of every column of iterations.
std::vector<std::pair<int64_t, double>> thinned(
    const std::vector<std::pair<int64_t, double>>& points) {
  if (points.size() <= kImbalanceColumns) return points;
  std::vector<std::pair<int64_t, double>> kept;
  for (size_t column = 0; column < kImbalanceColumns; ++column) {
    const auto begin =
        points.begin() + static_cast<int64_t>(column * points.size() / kImbalanceColumns);
    const auto end =
        points.begin() + static_cast<int64_t>((column + 1) * points.size() / kImbalanceColumns);
    kept.push_back(*std::max_element(
        begin, end, [](const auto& a, const auto& b) { return a.second < b.second; }));
  }
  return kept;
}

}  // namespace

std::string bars_chart(const BarChart& chart) {
  constexpr double kLabels = 250;  // room for names on the left
  constexpr double kBar = 16;
  constexpr double kGap = 10;
  constexpr double kTexts = 150;
  BGL_CHECK(chart.texts.size() == chart.groups.size() * chart.series.size(), chart.texts.size());
  double highest = 0;
  for (const BarChart::Group& group : chart.groups) {
    for (const double value : group.values) highest = std::max(highest, value);
  }
  if (!(highest > 0)) highest = 1;
  const double group_height = static_cast<double>(chart.series.size()) * kBar;
  const double height = kGap + static_cast<double>(chart.groups.size()) * (group_height + kGap);
  const ChartScale x{0, highest, kLabels, kWide - kTexts};
  std::string svg = open_svg(kWide, height, chart.label);
  double y = kGap;
  for (size_t g = 0; g < chart.groups.size(); ++g) {
    const BarChart::Group& group = chart.groups[g];
    BGL_CHECK(group.values.size() == chart.series.size(), group.name);
    text(&svg, kLabels - 8, y + group_height / 2 + 4, "end", group.name);
    for (size_t s = 0; s < chart.series.size(); ++s) {
      const double value = std::max(0.0, group.values[s]);
      const std::string& words = chart.texts[g * chart.series.size() + s];
      svg_add(&svg,
              "<rect class=\"k{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\">"
              "<title>{}</title></rect>\n",
              (s + 1) % 8, kLabels, y, x.at(value) - kLabels, kBar - 2,
              escape_html(fmt::format("{}: {} {}", group.name, chart.series[s], words)));
      text(&svg, x.at(value) + 6, y + kBar - 5, "start", words);
      y += kBar;
    }
    y += kGap;
  }
  return svg + "</svg>\n";
}

std::string imbalance_chart(const ImbalanceChart& chart) {
  constexpr double kPlot = 220;
  constexpr double kRow = 18;
  std::string svg =
      open_svg(kWide, kPlot + kChartBottom + kRow * static_cast<double>(chart.deaths.size()),
               "imbalance by iteration");
  if (chart.points.empty()) return svg + "</svg>\n";
  const auto points = thinned(chart.points);
  double highest = 1.5;
  for (const auto& [iteration, imbalance] : points) highest = std::max(highest, imbalance);
  const auto first = static_cast<double>(points.front().first);
  const ChartScale y{1, 1 + 1.08 * (highest - 1), kPlot, kChartTop};
  const ChartScale x{first, std::max(first + 1, static_cast<double>(points.back().first)),
                     2.2 * kChartLeft, kWide - kChartRight};
  const double step = highest > 4 ? 1.0 : highest > 2 ? 0.5 : 0.1;
  for (int i = 0; 1 + i * step <= y.high; ++i) {
    line(&svg, "grid", x.from, y.at(1 + i * step), x.to, y.at(1 + i * step));
    text(&svg, x.from - 6, y.at(1 + i * step) + 4, "end", fmt::format("{:.1f}x", 1 + i * step));
  }
  line(&svg, "asked", x.from, y.at(chart.calm_limit), x.to, y.at(chart.calm_limit));
  number_axis(&svg, x, kPlot, "");
  for (const auto& [iteration, imbalance] : points) {
    svg_add(&svg,
            "<circle class=\"k{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"2\"><title>iteration {}: "
            "{:.3f}x</title></circle>\n",
            imbalance > chart.calm_limit ? 2 : 1, x.at(static_cast<double>(iteration)),
            y.at(imbalance), iteration, imbalance);
  }
  double row = kPlot + kChartBottom + 4;
  for (const ImbalanceChart::Deaths& deaths : chart.deaths) {
    text(&svg, x.from - 6, row + 4, "end", "OOM " + deaths.policy, "budget-text");
    for (const int64_t iteration : deaths.iterations) {
      const double at = x.at(static_cast<double>(iteration));
      svg_add(&svg,
              "<path class=\"k5\" d=\"M{:.1f} {:.1f}l4 7l-8 0Z\"><title>{}: out of memory in "
              "iteration {}</title></path>\n",
              at, row - 4, escape_html(deaths.policy), iteration);
    }
    row += kRow;
  }
  return svg + "</svg>\n";
}

std::string memory_chart(const std::vector<MemoryLine>& lines, int64_t budget_bytes,
                         const std::string& label) {
  constexpr double kHeight = 280;
  constexpr double kNames = 46;  // of lines, behind their ends
  std::string svg = open_svg(kHalf, kHeight, label);
  int64_t highest = std::max<int64_t>(budget_bytes, kKiB);
  double last = 1e-6;
  for (const MemoryLine& memory : lines) {
    highest = std::max(highest, memory.peak_bytes);
    if (!memory.end_ms.empty()) last = std::max(last, memory.end_ms.back());
  }
  const ChartScale y{0, 1.08 * static_cast<double>(highest), kHeight - kChartBottom, kChartTop};
  const bool seconds = last > 5000;
  const double unit = seconds ? 1000 : 1;
  const ChartScale x{0, last / unit, kChartLeft, kHalf - kNames};
  byte_axis(&svg, y, x.to);
  number_axis(&svg, x, y.from, seconds ? " s" : " ms");
  double last_label = -1e9;
  for (size_t i = 0; i < lines.size(); ++i) {
    const MemoryLine& memory = lines[i];
    if (memory.bytes.empty()) continue;
    std::string path;
    for (size_t p = 0; p < memory.bytes.size(); ++p) {
      svg_add(&path, "{}{:.1f} {:.1f}", path.empty() ? "M" : "L", x.at(memory.end_ms[p] / unit),
              y.at(static_cast<double>(memory.bytes[p])));
    }
    svg_add(&svg, "<path class=\"curve c{}\" d=\"{}\"><title>{}</title></path>\n", i % 8, path,
            escape_html(fmt::format("stage {}, rank {}: peak {}", memory.pp_rank, memory.rank,
                                    format_bytes(memory.peak_bytes))));
    const double at = y.at(static_cast<double>(memory.bytes.back()));
    if (std::abs(at - last_label) < 11) continue;
    last_label = at;
    text(&svg, x.to + 4, at + 4, "start", fmt::format("stage {}", memory.pp_rank));
  }
  budget_line(&svg, budget_bytes, y, x.to);
  return svg + "</svg>\n";
}

std::string streams_chart(const StreamPicture& picture) {
  constexpr double kRow = 26;
  constexpr double kHeight = kChartTop + kSimStreams * kRow + kChartBottom;
  const bool seconds = picture.end_ms > 5000;
  const double unit = seconds ? 1000 : 1;
  const double end = std::max(picture.end_ms, picture.begin_ms + 1e-6);
  const ChartScale x{picture.begin_ms / unit, end / unit, kChartLeft, kWide - kChartRight};
  std::string svg =
      open_svg(kWide, kHeight,
               fmt::format("streams of rank {} in iteration {}", picture.rank, picture.iteration));
  for (size_t s = 0; s < picture.streams.size(); ++s) {
    const double top = kChartTop + static_cast<double>(s) * kRow;
    text(&svg, kChartLeft - 6, top + kRow / 2 + 2, "end",
         std::string(sim_stream_name(static_cast<SimStream>(s))));
    line(&svg, "grid", kChartLeft, top + kRow - 3, x.to, top + kRow - 3);
    for (const StreamSpan& span : picture.streams[s]) {
      const double from = x.at(span.begin_ms / unit);
      svg_add(&svg,
              "<rect class=\"k{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\">"
              "<title>{}</title></rect>\n",
              span.kind % 8, from, top, std::max(0.4, x.at(span.end_ms / unit) - from), kRow - 4,
              escape_html(
                  fmt::format("{}: {:.2f} to {:.2f} ms", span.name, span.begin_ms, span.end_ms)));
    }
  }
  number_axis(&svg, x, kChartTop + kSimStreams * kRow, seconds ? " s" : " ms");
  return svg + "</svg>\n";
}

}  // namespace bagualu
