#include "bagualu/cli/plan_page_charts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "bagualu/base/units.h"
#include "bagualu/cli/chart_axes.h"

namespace bagualu {
namespace {

constexpr size_t kColumns = 240;  // of a picture over time: below two pixels nobody can point

int64_t total(const std::vector<int64_t>& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

double highest_of(const PlanPage& page) {
  int64_t highest = std::max<int64_t>(page.budget_bytes, kKiB);
  for (const PlanPageSeries& series : page.over_time) {
    for (const PlanPagePoint& point : series.points) {
      highest = std::max(highest, total(point.bytes));
    }
  }
  return 1.08 * static_cast<double>(highest);
}

/// At most kColumns points over the time of the series, each the highest of its column.
std::vector<PlanPagePoint> thinned(const std::vector<PlanPagePoint>& points) {
  if (points.size() <= kColumns) return points;
  std::vector<PlanPagePoint> columns;
  for (size_t column = 0; column < kColumns; ++column) {
    const size_t first = column * points.size() / kColumns;
    const size_t last = (column + 1) * points.size() / kColumns;
    const auto highest = std::max_element(points.begin() + static_cast<long>(first),
                                          points.begin() + static_cast<long>(last),
                                          [](const PlanPagePoint& a, const PlanPagePoint& b) {
                                            return total(a.bytes) < total(b.bytes);
                                          });
    columns.push_back(*highest);
    columns.back().begin = points[first].begin;
    columns.back().end = points[last - 1].end;
  }
  return columns;
}

/// Upper edge of the bands 0 to `kind` of a point.
int64_t edge(const PlanPagePoint& point, size_t kind) {
  return std::accumulate(point.bytes.begin(), point.bytes.begin() + static_cast<long>(kind) + 1,
                         int64_t{0});
}

/// Bands as stairs, the topmost first, each down to the axis: the next one covers it.
void draw_bands(std::string* svg, const PlanPage& page, const std::vector<PlanPagePoint>& points,
                const ChartScale& x, const ChartScale& y) {
  for (size_t kind = page.kinds.size(); kind-- > 0;) {
    std::string path = fmt::format("M{:.1f} {:.1f}", x.at(points.front().begin), y.at(0));
    for (const PlanPagePoint& point : points) {
      svg_add(&path, "V{:.1f}H{:.1f}", y.at(static_cast<double>(edge(point, kind))),
              x.at(point.end));
    }
    svg_add(svg, "<path class=\"k{}\" d=\"{}V{:.1f}Z\"/>\n", kind, path, y.at(0));
  }
}

void draw_tooltips(std::string* svg, const PlanPage& page, const std::vector<PlanPagePoint>& points,
                   const ChartScale& x, const ChartScale& y) {
  for (const PlanPagePoint& point : points) {
    std::string text = fmt::format("{}: {}", point.label, format_bytes(total(point.bytes)));
    for (size_t kind = 0; kind < page.kinds.size(); ++kind) {
      text += fmt::format("\n{} {}", page.kinds[kind], format_bytes(point.bytes[kind]));
    }
    const double begin = x.at(point.begin);
    svg_add(svg,
            "<rect class=\"hit\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\">"
            "<title>{}</title></rect>\n",
            begin, y.to, std::max(0.5, x.at(point.end) - begin), y.from - y.to, escape_html(text));
  }
}

}  // namespace

std::string over_time_chart(const PlanPage& page, const PlanPageSeries& series) {
  constexpr double kWidth = 560;
  constexpr double kHeight = 230;
  std::string svg = open_svg(kWidth, kHeight, "memory over time, " + series.name);
  if (series.points.empty()) return svg + "</svg>\n";
  const ChartScale y{0, highest_of(page), kHeight - kChartBottom, kChartTop};
  const double last = std::max(series.points.back().end, series.points.front().begin + 1e-9);
  const ChartScale x{series.points.front().begin, last, kChartLeft, kWidth - kChartRight};
  byte_axis(&svg, y, x.to);
  number_axis(&svg, x, y.from, " " + escape_html(page.time_unit));
  const std::vector<PlanPagePoint> points = thinned(series.points);
  draw_bands(&svg, page, points, x, y);
  budget_line(&svg, page.budget_bytes, y, x.to);
  const auto peak = std::max_element(points.begin(), points.end(),
                                     [](const PlanPagePoint& a, const PlanPagePoint& b) {
                                       return total(a.bytes) < total(b.bytes);
                                     });
  const double px = x.at((peak->begin + peak->end) / 2);
  const double py = y.at(static_cast<double>(total(peak->bytes)));
  draw_tooltips(&svg, page, points, x, y);
  svg_add(&svg, "<circle class=\"peak\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"/>\n", px, py);
  svg_add(
      &svg,
      "<text class=\"peak-text\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{} in {}</text>\n",
      px < kWidth / 2 ? px + 6 : px - 6, py - 5, px < kWidth / 2 ? "start" : "end",
      format_bytes(total(peak->bytes)), escape_html(peak->label));
  return svg + "</svg>\n";
}

std::string ranks_chart(const PlanPage& page) {
  constexpr double kWidth = 1160;
  constexpr double kHeight = 260;
  int64_t highest = std::max<int64_t>(page.budget_bytes, kKiB);
  for (const PlanPageRank& rank : page.ranks) {
    highest = std::max({highest, rank.peak_bytes, rank.calm_bytes});
  }
  const ChartScale y{0, 1.08 * static_cast<double>(highest), kHeight - kChartBottom, kChartTop};
  std::string svg = open_svg(kWidth, kHeight, "peak of every rank by kind");
  const double right = kWidth - kChartRight;
  byte_axis(&svg, y, right);
  const double slot =
      (right - kChartLeft) / static_cast<double>(std::max<size_t>(1, page.ranks.size()));
  const double wide = std::clamp(0.7 * slot, 1.0, 64.0);
  const size_t every = static_cast<size_t>(std::ceil(34.0 / slot));
  for (size_t i = 0; i < page.ranks.size(); ++i) {
    const PlanPageRank& rank = page.ranks[i];
    const double middle = kChartLeft + slot * (static_cast<double>(i) + 0.5);
    int64_t below = 0;
    for (size_t kind = 0; kind < page.kinds.size(); ++kind) {
      const int64_t above = below + rank.peak_kinds[kind];
      const double top = y.at(static_cast<double>(above));
      svg_add(&svg,
              "<rect class=\"k{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" "
              "height=\"{:.1f}\"><title>{}</title></rect>\n",
              kind, middle - wide / 2, top, wide, y.at(static_cast<double>(below)) - top,
              escape_html(fmt::format("rank {}: {} {}", rank.name, page.kinds[kind],
                                      format_bytes(rank.peak_kinds[kind]))));
      below = above;
    }
    const double calm = y.at(static_cast<double>(rank.calm_bytes));
    svg_add(&svg,
            "<line class=\"calm\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"><title>"
            "{}</title></line>\n",
            middle - wide / 2 - 3, middle + wide / 2 + 3, calm, calm,
            escape_html(fmt::format("rank {}: balanced routing {}", rank.name,
                                    format_bytes(rank.calm_bytes))));
    if (i % every == 0) {
      svg_add(&svg,
              "<text class=\"axis\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>\n",
              middle, y.from + 18, escape_html(rank.name));
    }
  }
  budget_line(&svg, page.budget_bytes, y, right);
  return svg + "</svg>\n";
}

std::string curves_chart(const PlanPage& page) {
  constexpr double kWidth = 1160;
  constexpr double kHeight = 300;
  int64_t highest = std::max<int64_t>(page.budget_bytes, kKiB);
  double low = 1;
  double high = 1.1;
  for (const PlanPageCurve& curve : page.curves) {
    for (const auto& [factor, bytes] : curve.points) {
      highest = std::max(highest, bytes);
      low = std::min(low, factor);
      high = std::max(high, factor);
    }
  }
  const double right = kWidth - 90;  // names of the curves stand behind their ends
  const ChartScale y{0, 1.08 * static_cast<double>(highest), kHeight - kChartBottom, kChartTop};
  const ChartScale x{low, high, kChartLeft, right};
  std::string svg = open_svg(kWidth, kHeight, "peak against imbalance");
  byte_axis(&svg, y, right);
  number_axis(&svg, x, y.from, "x");
  if (page.asked_factor >= low && page.asked_factor <= high) {
    svg_add(&svg,
            "<line class=\"asked\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\">"
            "<title>asked: {3:.2f}x</title></line>\n",
            x.at(page.asked_factor), y.from, y.to, page.asked_factor);
  }
  double last_label = -1e9;
  for (size_t i = 0; i < page.curves.size(); ++i) {
    const PlanPageCurve& curve = page.curves[i];
    if (curve.points.empty()) continue;
    std::string path;
    for (const auto& [factor, bytes] : curve.points) {
      svg_add(&path, "{}{:.1f} {:.1f}", path.empty() ? "M" : "L", x.at(factor),
              y.at(static_cast<double>(bytes)));
    }
    svg_add(&svg, "<path class=\"curve c{}\" d=\"{}\"><title>{}</title></path>\n", i % 8, path,
            escape_html(curve.name));
    const double label = y.at(static_cast<double>(curve.points.back().second));
    if (std::abs(label - last_label) < 12) continue;
    last_label = label;
    svg_add(&svg, "<text class=\"axis\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", right + 6,
            label + 4, escape_html(curve.name));
  }
  budget_line(&svg, page.budget_bytes, y, right);
  return svg + "</svg>\n";
}

}  // namespace bagualu
