#pragma once

#include <string>
#include <vector>

#include "bagualu/cli/command_line.h"

namespace bagualu {

/// `bagualu schedule`: a pipeline order, drawn, with in-flight counts and bubbles; or, with
/// --replay, traced steps against their prediction (schedule_replay.h).
/// Throws:  InvalidInput; then nothing was printed and no file written.
int run_schedule(const std::vector<std::string>& arguments, const Streams& streams);

}  // namespace bagualu
