#pragma once

#include <string>
#include <vector>

#include "bagualu/model/job.h"

namespace bagualu {

/// The arguments that make Megatron-LM run this job, as words: {"--num-layers", "32", "--swiglu"}.
/// World size is not among them. What the launch command decides and Megatron has no flag for
/// (allocator settings, the model's name) is left out; read back (megatron_args.h), everything else
/// is the same.
/// Throws: InvalidInput(where, field) on what Megatron has no flag for: V-shaped, zero-bubble and
///         DualPipe orders, widths or settings of other frameworks; and on what its rules exclude
///         (check_exclusions).
std::vector<std::string> megatron_flags(const Job& job, const std::string& where = "job");

/// The same ready to paste into a script: MEGATRON_ARGS=( ... ), one flag a line.
std::string megatron_flags_text(const Job& job, const std::string& where = "job");

/// Megatron's own rules about which flags go together, checked on the words alone; nothing here is
/// shared with the writer. Empty if all hold; else one line per broken rule.
std::vector<std::string> check_exclusions(const std::vector<std::string>& flags);

}  // namespace bagualu
