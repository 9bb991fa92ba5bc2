#include "bagualu/cli/chart_axes.h"

#include <algorithm>
#include <cmath>

#include "bagualu/base/units.h"
#include "bagualu/cli/page_parts.h"

namespace bagualu {
namespace {

/// 1, 2 or 5 times a power of ten (of two in bytes) so that about `wanted` fit into the span.
double tick_step(double span, int wanted, double unit) {
  const double rough = span / unit / wanted;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power * unit;
  }
  return 10 * power * unit;
}

double byte_unit(double highest) {
  if (highest >= 2.0 * static_cast<double>(kGiB)) return static_cast<double>(kGiB);
  return static_cast<double>(highest >= 2.0 * static_cast<double>(kMiB) ? kMiB : kKiB);
}

std::string tick_text(double bytes, double unit) {
  const char* name = unit == static_cast<double>(kGiB)   ? "GiB"
                     : unit == static_cast<double>(kMiB) ? "MiB"
                                                         : "KiB";
  return fmt::format("{:.6g} {}", bytes / unit, name);
}

}  // namespace

std::string open_svg(double width, double height, const std::string& label) {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" "
      "aria-label=\"{}\">\n",
      width, height, escape_html(label));
}

void byte_axis(std::string* svg, const ChartScale& y, double right) {
  const double unit = byte_unit(y.high);
  const double step = tick_step(y.high, 5, unit);
  for (double value = 0; value <= y.high; value += step) {
    svg_add(svg, "<line class=\"grid\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n",
            kChartLeft, right, y.at(value), y.at(value));
    svg_add(svg, "<text class=\"axis\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
            kChartLeft - 6, y.at(value) + 4, tick_text(value, unit));
  }
}

void number_axis(std::string* svg, const ChartScale& x, double y, const std::string& unit) {
  const double step = tick_step(x.high - x.low, 6, 1.0);
  for (double value = std::ceil(x.low / step) * step; value <= x.high + step * 1e-9;
       value += step) {
    // The last label must not hang over the edge.
    const bool at_end = x.at(value) > x.to - 16;
    svg_add(svg,
            "<text class=\"axis\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{:.6g}{}</text>\n",
            at_end ? x.to : x.at(value), y + 18, at_end ? "end" : "middle", value, unit);
  }
}

void budget_line(std::string* svg, int64_t budget_bytes, const ChartScale& y, double right) {
  if (budget_bytes <= 0) return;
  const double at = y.at(static_cast<double>(budget_bytes));
  svg_add(svg, "<line class=\"budget\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n",
          kChartLeft, right, at, at);
  svg_add(svg,
          "<text class=\"budget-text\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">budget "
          "{}</text>\n",
          right - 2, at - 4, format_bytes(budget_bytes));
}

}  // namespace bagualu
