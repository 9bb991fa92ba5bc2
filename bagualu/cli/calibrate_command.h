#pragma once

#include <string>
#include <vector>

#include "bagualu/cli/command_line.h"
#include "bagualu/cli/source_tree.h"

namespace bagualu {

/// `bagualu calibrate`: fits the efficiencies of a system file to measured jobs, and compares a
/// memory snapshot with the prediction, bucket by bucket.
/// Returns: exit code.
/// Throws:  InvalidInput; then nothing was printed and no file written.
int run_calibrate(const std::vector<std::string>& arguments, const SourceTree& tree,
                  const Streams& streams);

}  // namespace bagualu
