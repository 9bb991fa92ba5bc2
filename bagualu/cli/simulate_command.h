#pragma once

#include <string>
#include <vector>

#include "bagualu/cli/command_line.h"

namespace bagualu {

/// `bagualu simulate`. Throws: InvalidInput for bad flags and files.
int run_simulate(const std::vector<std::string>& arguments, const Streams& streams);

}  // namespace bagualu
