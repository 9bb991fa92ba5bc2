#pragma once

#include <string>

#include "bagualu/base/json.h"
#include "bagualu/cost/system.h"

namespace bagualu {

/// A number of a system file that may be fitted, and between which bounds; searched by its
/// logarithm.
struct FitRange {
  const char* key;
  double low;
  double high;
};

/// Throws: InvalidInput naming the keys that can be fitted.
const FitRange& fit_range(const std::string& key);

double system_value(const SystemSpec& system, const std::string& key);

/// Rounded as a fit may promise it: four digits, whole nanoseconds.
void set_system_value(Json& system, const std::string& key, double value);

}  // namespace bagualu
