#pragma once

#include <string>
#include <vector>

#include "bagualu/cli/command_line.h"

namespace bagualu {

/// Whether these are arguments of run_simulate_validate().
bool asks_for_validation(const std::vector<std::string>& arguments);

/// `bagualu simulate --validate LOG [--json FILE|-] [--quiet]`: a real run's decisions, bytes and
/// times against their simulation, step by step.
/// Returns: kExitDone if decisions and bytes are equal, kExitFailed if one is not.
/// Throws:  InvalidInput; then nothing was printed and no file written.
int run_simulate_validate(const std::vector<std::string>& arguments, const Streams& streams);

}  // namespace bagualu
