#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <iterator>
#include <string>
#include <utility>

namespace bagualu {

inline constexpr double kChartLeft = 64;  // room for the labels of the y axis
inline constexpr double kChartTop = 14;
inline constexpr double kChartBottom = 30;
inline constexpr double kChartRight = 14;

/// A linear axis from 0 or `low` on.
struct ChartScale {
  double low = 0;
  double high = 1;
  double from = 0;  ///< pixels
  double to = 1;

  double at(double value) const { return from + (value - low) / (high - low) * (to - from); }
};

template <class... Values>
void svg_add(std::string* svg, fmt::format_string<Values...> text, Values&&... values) {
  fmt::format_to(std::back_inserter(*svg), text, std::forward<Values>(values)...);
}

/// Requires: the caller closes it.
std::string open_svg(double width, double height, const std::string& label);
/// Horizontal lines and labels of a byte axis.
void byte_axis(std::string* svg, const ChartScale& y, double right);
/// Labels of a horizontal axis below `y` pixels; `unit` stands behind each number.
void number_axis(std::string* svg, const ChartScale& x, double y, const std::string& unit);
/// Nothing for a budget of 0: none.
void budget_line(std::string* svg, int64_t budget_bytes, const ChartScale& y, double right);

}  // namespace bagualu
