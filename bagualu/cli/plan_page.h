// The page of `bagualu plan --report`: one self-contained HTML file, drawn here as inline SVG.
//
// Glossary
//   kind   what bytes are for: a band of the stacked pictures ("static", "saved activations", ...)
// Invariants
//   Equal pages give equal bytes. Nothing is fetched: no script, no link, no font; texts are
//   escaped, whatever they hold. The page is well-formed XML too, so that tools can check it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/cli/page_parts.h"

namespace bagualu {

/// Memory of a rank during one pass (or any span of time).
struct PlanPagePoint {
  std::string label;  ///< "2F7"; shown when the reader points at it
  double begin = 0;   ///< in PlanPage::time_unit, rising
  double end = 0;
  std::vector<int64_t> bytes;  ///< [kinds], highest inside the span
};

struct PlanPageSeries {
  std::string name;  ///< "rank 0: Et*4"
  std::vector<PlanPagePoint> points;
};

struct PlanPageRank {
  std::string name;                 ///< "0"
  std::string content;              ///< "Et*4"
  std::vector<int64_t> peak_kinds;  ///< [kinds] at the peak of the asked load
  int64_t static_bytes = 0;
  int64_t calm_bytes = 0;        ///< peak, balanced routing
  int64_t peak_bytes = 0;        ///< peak at the asked load
  int64_t worst_bytes = 0;       ///< peak at the largest imbalance there can be
  double survivable_factor = 0;  ///< 0: unknown or none
  std::string cause;             ///< "layer10.combine_unpack in 0B3"
};

/// Peak of a rank against the imbalance.
struct PlanPageCurve {
  std::string name;
  std::vector<std::pair<double, int64_t>> points;  ///< factor, peak bytes; factors rising
};

struct PlanPage {
  std::string title;                                       ///< "deepseek-v3 on 1024 devices"
  std::string summary;                                     ///< one sentence under it
  bool over_budget = false;                                ///< colours the summary
  std::vector<std::pair<std::string, std::string>> facts;  ///< name, value
  int64_t budget_bytes = 0;                                ///< 0: none, no line is drawn
  double asked_factor = 0;                                 ///< marked in the curves; 0: not
  std::vector<std::string> kinds;                          ///< from the bottom up, eight at most
  std::vector<PlanPageRank> ranks;
  std::string time_unit = "ms";
  std::vector<PlanPageSeries> over_time;  ///< one picture each
  std::vector<PlanPageCurve> curves;
  std::string pipeline_svg;  ///< of draw_order_svg(): taken as it is; empty: none
  std::vector<PageTable> tables;
  std::vector<std::string> notes;  ///< what was left out, what the numbers count
};

/// Requires: every `bytes` and `peak_kinds` is as long as `kinds`; at most eight kinds.
std::string plan_page_html(const PlanPage& page);

}  // namespace bagualu
