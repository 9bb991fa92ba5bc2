#pragma once

#include <string>

#include "bagualu/cli/command_line.h"

namespace bagualu {

/// `bagualu simulate --validate LOG`: a real run's decisions, bytes and times against their
/// simulation, step by step. `json`: a file, "-" for the output in place of the table, or "" for
/// neither.
/// Returns: kExitDone if decisions and bytes are equal, kExitFailed if one is not.
/// Throws:  InvalidInput; then nothing was printed and no file written.
int run_simulate_validate(const std::string& log, const std::string& json, bool quiet,
                          const Streams& streams);

}  // namespace bagualu
