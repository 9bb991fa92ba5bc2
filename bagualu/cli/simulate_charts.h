#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/cli/simulate_detail.h"

namespace bagualu {

// Inline SVG pictures of simulations; colours are classes of the page's style sheet.

/// Bars lying one below the other, in groups.
struct BarChart {
  std::string label;                ///< for readers without eyes
  std::vector<std::string> series;  ///< colours k1, k2, ... in a group
  struct Group {
    std::string name;
    std::vector<double> values;  ///< by series; 0 or less: none, drawn as "-"
  };
  std::vector<Group> groups;
  std::vector<std::string> texts;  ///< behind each bar: [group * series + s]
};
std::string bars_chart(const BarChart& chart);

/// Imbalance by iteration, and a row of marks for every policy that ran out of memory.
struct ImbalanceChart {
  std::vector<std::pair<int64_t, double>> points;  ///< iterations rising
  struct Deaths {
    std::string policy;
    std::vector<int64_t> iterations;
  };
  std::vector<Deaths> deaths;
  double calm_limit = 1.2;  ///< a line
};
std::string imbalance_chart(const ImbalanceChart& chart);

/// A line per pipeline rank over one step.
std::string memory_chart(const std::vector<MemoryLine>& lines, int64_t budget_bytes,
                         const std::string& label);
/// A row of spans per stream.
std::string streams_chart(const StreamPicture& picture);

}  // namespace bagualu
