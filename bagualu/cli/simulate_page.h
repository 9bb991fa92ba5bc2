#pragma once

#include <string>

#include "bagualu/cli/simulate_report.h"

namespace bagualu {

/// The page of `bagualu simulate --html`: self-contained, equal reports give equal bytes.
std::string simulate_page(const SimulateReport& report);

}  // namespace bagualu
