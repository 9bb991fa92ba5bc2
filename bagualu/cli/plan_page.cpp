#include "bagualu/cli/plan_page.h"

#include <fmt/format.h>

#include <algorithm>

#include "bagualu/base/error.h"
#include "bagualu/base/units.h"
#include "bagualu/cli/plan_page_charts.h"

namespace bagualu {
namespace {

constexpr size_t kOpenPictures = 12;  // further ones fold away
constexpr size_t kKindColours = 8;

std::string ranks_table(const PlanPage& page) {
  if (page.ranks.empty()) return "";
  PageTable rows;
  rows.head = {"rank",       "holds",      "static",   "balanced",
               "asked load", "worst load", "survives", "peak at the asked load"};
  rows.numeric = {true, false, true, true, true, true, true, false};
  for (const PlanPageRank& rank : page.ranks) {
    const bool over = page.budget_bytes > 0 && rank.peak_bytes > page.budget_bytes;
    rows.rows.push_back(
        {rank.name, rank.content, format_bytes(rank.static_bytes), format_bytes(rank.calm_bytes),
         format_bytes(rank.peak_bytes) + (over ? " (over)" : ""), format_bytes(rank.worst_bytes),
         rank.survivable_factor > 0 ? fmt::format("{:.2f}x", rank.survivable_factor)
                                    : std::string("-"),
         rank.cause});
  }
  return page_table(rows);
}

std::string pictures(const PlanPage& page) {
  std::string open;
  std::string folded;
  for (size_t i = 0; i < page.over_time.size(); ++i) {
    const PlanPageSeries& series = page.over_time[i];
    std::string& part = i < kOpenPictures ? open : folded;
    part += html_tag(
        "div", "",
        "\n" + html_tag("h3", "", escape_html(series.name)) + over_time_chart(page, series));
  }
  if (open.empty()) return "";
  std::string all = page_legend(page.kinds) + html_tag("div", "class=\"grid\"", "\n" + open);
  if (!folded.empty()) {
    all +=
        html_tag("details", "",
                 html_tag("summary", "",
                          fmt::format("{} further ranks", page.over_time.size() - kOpenPictures)) +
                     html_tag("div", "class=\"grid\"", "\n" + folded));
  }
  return all;
}

std::string body(const PlanPage& page) {
  std::string html = page_head(page.title, page.summary, page.over_budget);
  html += page_facts(page.facts);
  html += page_section(
      "Peak of every rank", "Bars: at the asked load, by kind. Line: balanced routing.",
      page.ranks.empty() ? "" : page_legend(page.kinds) + ranks_chart(page) + ranks_table(page));
  html +=
      page_section("Memory over time",
                   "Each step is one pass of a micro-batch, at its highest. Same scale everywhere.",
                   pictures(page));
  html += page_section(
      "Peak against imbalance",
      "Rows of the hottest rank over the mean, the same in every layer and micro-batch.",
      page.curves.empty() ? "" : curves_chart(page));
  html += page_section("Pipeline", "",
                       page.pipeline_svg.empty()
                           ? ""
                           : html_tag("div", "class=\"scroll paper\"", "\n" + page.pipeline_svg));
  for (const PageTable& t : page.tables) html += page_section(t.title, t.note, page_table(t));
  html += page_notes(page.notes);
  return html;
}

void check(const PlanPage& page) {
  BGL_CHECK(page.kinds.size() <= kKindColours, page.kinds.size());
  for (const PlanPageRank& rank : page.ranks) {
    BGL_CHECK(rank.peak_kinds.size() == page.kinds.size(), rank.name);
  }
  for (const PlanPageSeries& series : page.over_time) {
    for (const PlanPagePoint& point : series.points) {
      BGL_CHECK(point.bytes.size() == page.kinds.size(), series.name, point.label);
    }
  }
}

}  // namespace

std::string plan_page_html(const PlanPage& page) {
  check(page);
  return page_document(page.title, body(page));
}

}  // namespace bagualu
