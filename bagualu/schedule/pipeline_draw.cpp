#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>

#include "bagualu/base/error.h"
#include "bagualu/schedule/pipeline_text.h"

namespace bagualu {
namespace {

int lowest_stage(const std::vector<PipelinePass>& list) {
  int lowest = list.empty() ? 0 : list.front().stage;
  for (const PipelinePass& pass : list) lowest = std::min(lowest, pass.stage);
  return lowest;
}

// Of forward, backward, input gradient, weight gradient; a rank's higher stages are paler.
constexpr std::array<std::string_view, kPassLetters.size()> kColors = {"#4878a8", "#d1843c",
                                                                       "#d1843c", "#6a9f58"};

void check_run(const PipelineOrder& order, const PipelineRun& run) {
  BGL_CHECK(run.start_ns.size() == order.ranks.size(), run.start_ns.size(), order.ranks.size());
  for (size_t r = 0; r < order.ranks.size(); ++r) {
    BGL_CHECK(run.start_ns[r].size() == order.ranks[r].size(), r, run.start_ns[r].size());
  }
}

}  // namespace

std::string draw_order(const PipelineOrder& order, const PipelineRun& run, int columns) {
  BGL_CHECK(columns >= 1, columns);
  check_run(order, run);
  const size_t label = std::to_string(order.ranks.size() - 1).size();
  // In double: ns times columns may pass 2^63.
  const double scale = run.makespan_ns == 0
                           ? 0
                           : static_cast<double>(columns) / static_cast<double>(run.makespan_ns);
  const auto column = [scale](int64_t ns) {
    return static_cast<size_t>(static_cast<double>(ns) * scale + 0.5);
  };
  std::string text;
  for (size_t r = 0; r < order.ranks.size(); ++r) {
    const auto& list = order.ranks[r];
    const int lowest = lowest_stage(list);
    std::string row(static_cast<size_t>(columns), '.');
    for (size_t i = 0; i < list.size(); ++i) {
      const size_t begin = column(run.start_ns[r][i]);
      const size_t width = column(run.end_ns[r][i]) - begin;
      char letter = kPassLetters[static_cast<size_t>(list[i].kind)];
      if (list[i].stage != lowest) letter = static_cast<char>(std::tolower(letter));
      std::string cell = letter + std::to_string(list[i].microbatch);
      // A number cut short would be read as another one.
      if (cell.size() > width) cell.resize(1);
      cell.resize(std::max(width, cell.size()), '-');
      row.replace(begin, width, cell, 0, width);
    }
    text += fmt::format("{:>{}} {}\n", r, label, row);
  }
  return text;
}

std::string draw_order_svg(const PipelineOrder& order, const PipelineRun& run, int width) {
  BGL_CHECK(width >= 1, width);
  check_run(order, run);
  constexpr int kRow = 22;
  constexpr int kLeft = 60;
  const int height = kRow * static_cast<int>(order.ranks.size());
  const double scale =
      run.makespan_ns == 0 ? 0 : static_cast<double>(width) / static_cast<double>(run.makespan_ns);
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" "
      "font-family=\"sans-serif\" font-size=\"10\">\n",
      width + kLeft, height + 2);
  for (size_t r = 0; r < order.ranks.size(); ++r) {
    const int y = kRow * static_cast<int>(r) + 1;
    svg += fmt::format("<text x=\"2\" y=\"{}\">rank {}</text>\n", y + 14, r);
    svg += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"#eeeeee\"/>\n",
                       kLeft, y, width, kRow - 2);
    const auto& list = order.ranks[r];
    const int lowest = lowest_stage(list);
    for (size_t i = 0; i < list.size(); ++i) {
      const double x = kLeft + static_cast<double>(run.start_ns[r][i]) * scale;
      const double wide = static_cast<double>(run.end_ns[r][i] - run.start_ns[r][i]) * scale;
      const std::string name = pass_text(list[i]);
      svg += fmt::format(
          "<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\" "
          "fill-opacity=\"{}\" stroke=\"white\" stroke-width=\"0.5\"><title>{} {}-{} ns</title>"
          "</rect>\n",
          x, y, wide, kRow - 2, kColors[static_cast<size_t>(list[i].kind)],
          list[i].stage == lowest ? "1" : "0.6", name, run.start_ns[r][i], run.end_ns[r][i]);
      const std::string number = std::to_string(list[i].microbatch);
      if (wide < 6.0 * static_cast<double>(number.size()) + 2) continue;
      svg += fmt::format("<text x=\"{:.2f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
                         x + wide / 2, y + 14, number);
    }
  }
  return svg + "</svg>\n";
}

}  // namespace bagualu
