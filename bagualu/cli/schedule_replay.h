#pragma once

#include <string>
#include <vector>

#include "bagualu/cli/command_line.h"

namespace bagualu {

/// `bagualu schedule --replay`: traced steps against what their lists take with the median times of
/// the others. `json`: a file, "-" for the output in place of the table, or "" for neither. Throws:
/// InvalidInput; then nothing was printed and no file written.
int run_schedule_replay(const std::vector<std::string>& traces, const std::string& json,
                        const Streams& streams);

}  // namespace bagualu
