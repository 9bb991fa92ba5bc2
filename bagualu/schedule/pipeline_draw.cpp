#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>

#include "bagualu/base/error.h"
#include "bagualu/schedule/overlap_order.h"
#include "bagualu/schedule/pipeline_text.h"

namespace bagualu {
namespace {

int lowest_stage(const std::vector<PipelinePass>& list) {
  int lowest = list.empty() ? 0 : list.front().stage;
  for (const PipelinePass& pass : list) lowest = std::min(lowest, pass.stage);
  return lowest;
}

// Of forward, backward, input gradient, weight gradient, recompute, offload, reload; a rank's
// higher stages are paler.
constexpr std::array<std::string_view, kPassLetters.size()> kColors = {
    "#4878a8", "#d1843c", "#d1843c", "#6a9f58", "#b08fc7", "#8a8a8a", "#5f9ea0"};

void check_run(const PipelineOrder& order, const PipelineRun& run) {
  BGL_CHECK(run.start_ns.size() == order.ranks.size(), run.start_ns.size(), order.ranks.size());
  for (size_t r = 0; r < order.ranks.size(); ++r) {
    BGL_CHECK(run.start_ns[r].size() == order.ranks[r].size(), r, run.start_ns[r].size());
  }
}

using Fused = std::vector<std::vector<bool>>;

// What is drawn side by side: a rank's passes, and below them its copies, a row per direction.
struct Row {
  size_t rank = 0;
  std::string_view kinds;
};

std::vector<Row> rows_of(const PipelineOrder& order) {
  std::vector<Row> rows;
  for (size_t r = 0; r < order.ranks.size(); ++r) {
    rows.push_back({r, "FBIWR"});
    for (std::string_view engine : {"O", "L"}) {
      const auto& list = order.ranks[r];
      const bool used = std::any_of(list.begin(), list.end(), [&](const PipelinePass& pass) {
        return kPassLetters[static_cast<size_t>(pass.kind)] == engine.front();
      });
      if (used) rows.push_back({r, engine});
    }
  }
  return rows;
}

bool stands_in(const Row& row, const PipelinePass& pass) {
  return row.kinds.find(kPassLetters[static_cast<size_t>(pass.kind)]) != std::string_view::npos;
}

std::string cell_text(const PipelinePass& pass, int lowest) {
  char letter = kPassLetters[static_cast<size_t>(pass.kind)];
  if (pass.stage != lowest) letter = static_cast<char>(std::tolower(letter));
  return letter + std::to_string(pass.microbatch);
}

// A number cut short would be read as another one.
std::string fit(const std::string& cell, bool slot, size_t width) {
  if (cell.size() <= width) return cell;
  return slot ? "X" : cell.substr(0, 1);
}

std::string draw(const PipelineOrder& order, const Fused* fused, const PipelineRun& run,
                 int columns) {
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
  for (const Row& at : rows_of(order)) {
    const auto& list = order.ranks[at.rank];
    const int lowest = lowest_stage(list);
    std::string row(static_cast<size_t>(columns), '.');
    for (size_t i = 0; i < list.size(); ++i) {
      if (!stands_in(at, list[i])) continue;
      const size_t begin = column(run.start_ns[at.rank][i]);
      const size_t width = column(run.end_ns[at.rank][i]) - begin;
      const bool slot = fused != nullptr && (*fused)[at.rank][i];
      std::string cell = cell_text(list[i], lowest);
      if (slot) cell += cell_text(list[++i], lowest);
      cell = fit(cell, slot, width);
      cell.resize(std::max(width, cell.size()), '-');
      row.replace(begin, width, cell, 0, width);
    }
    const std::string name = at.kinds.size() > 1 ? std::to_string(at.rank) : "";
    text += fmt::format("{:>{}} {}\n", name, label, row);
  }
  return text;
}

struct Box {
  double x = 0, width = 0;
  int y = 0, height = 0;
};

std::string box_svg(const Box& at, const PipelinePass& pass, bool lowest, int64_t start_ns,
                    int64_t end_ns) {
  std::string svg = fmt::format(
      "<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\" "
      "fill-opacity=\"{}\" stroke=\"white\" stroke-width=\"0.5\"><title>{} {}-{} ns</title>"
      "</rect>\n",
      at.x, at.y, at.width, at.height, kColors[static_cast<size_t>(pass.kind)],
      lowest ? "1" : "0.6", pass_text(pass), start_ns, end_ns);
  const std::string number = std::to_string(pass.microbatch);
  if (at.width < 6.0 * static_cast<double>(number.size()) + 2) return svg;
  return svg + fmt::format("<text x=\"{:.2f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
                           at.x + at.width / 2, at.y + at.height / 2 + 4, number);
}

std::string draw_svg(const PipelineOrder& order, const Fused* fused, const PipelineRun& run,
                     int width) {
  BGL_CHECK(width >= 1, width);
  check_run(order, run);
  constexpr int kRow = 22;
  constexpr int kLeft = 60;
  const std::vector<Row> rows = rows_of(order);
  const double scale =
      run.makespan_ns == 0 ? 0 : static_cast<double>(width) / static_cast<double>(run.makespan_ns);
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" "
      "font-family=\"sans-serif\" font-size=\"10\">\n",
      width + kLeft, kRow * static_cast<int>(rows.size()) + 2);
  for (size_t row = 0; row < rows.size(); ++row) {
    const size_t r = rows[row].rank;
    const int y = kRow * static_cast<int>(row) + 1;
    const std::string name = rows[row].kinds.size() > 1 ? fmt::format("rank {}", r) : "copies";
    svg += fmt::format("<text x=\"2\" y=\"{}\">{}</text>\n", y + 14, name);
    svg += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"#eeeeee\"/>\n",
                       kLeft, y, width, kRow - 2);
    const auto& list = order.ranks[r];
    const int lowest = lowest_stage(list);
    for (size_t i = 0; i < list.size(); ++i) {
      if (!stands_in(rows[row], list[i])) continue;
      const bool upper = fused != nullptr && (*fused)[r][i];
      const bool lower = fused != nullptr && i > 0 && (*fused)[r][i - 1];
      const Box box = {.x = kLeft + static_cast<double>(run.start_ns[r][i]) * scale,
                       .width = static_cast<double>(run.end_ns[r][i] - run.start_ns[r][i]) * scale,
                       .y = lower ? y + (kRow - 2) / 2 : y,
                       .height = upper || lower ? (kRow - 2) / 2 : kRow - 2};
      svg += box_svg(box, list[i], list[i].stage == lowest, run.start_ns[r][i], run.end_ns[r][i]);
    }
  }
  return svg + "</svg>\n";
}

}  // namespace

std::string draw_order(const PipelineOrder& order, const PipelineRun& run, int columns) {
  return draw(order, nullptr, run, columns);
}

std::string draw_order(const OverlapOrder& order, const PipelineRun& run, int columns) {
  return draw(order.order, &order.fused, run, columns);
}

std::string draw_order_svg(const PipelineOrder& order, const PipelineRun& run, int width) {
  return draw_svg(order, nullptr, run, width);
}

std::string draw_order_svg(const OverlapOrder& order, const PipelineRun& run, int width) {
  return draw_svg(order.order, &order.fused, run, width);
}

}  // namespace bagualu
