#pragma once

#include <string>

#include "bagualu/cli/plan_page.h"

namespace bagualu {

/// Inline SVG pictures of the page. Colours are classes of its style sheet (k0 to k7, axis,
/// budget). Series are thinned to what the width can show; the highest point of every column stays.
std::string over_time_chart(const PlanPage& page, const PlanPageSeries& series);
std::string ranks_chart(const PlanPage& page);
std::string curves_chart(const PlanPage& page);

}  // namespace bagualu
