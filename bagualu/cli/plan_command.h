#pragma once

#include <string>
#include <vector>

#include "bagualu/cli/command_line.h"
#include "bagualu/cli/source_tree.h"

namespace bagualu {

/// `bagualu plan`: memory of one rank, and what it survives under each policy.
/// Returns: exit code; kExitInfeasible if the budget is under the floor.
/// Throws:  InvalidInput; then nothing was printed and no file written.
int run_plan(const std::vector<std::string>& arguments, const SourceTree& tree,
             const Streams& streams);

}  // namespace bagualu
