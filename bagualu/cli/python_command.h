#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/cli/source_tree.h"

namespace bagualu {

/// A Python program to start in place of this one.
struct PythonInvocation {
  std::filesystem::path python;
  std::vector<std::string> arguments;  ///< argv, the interpreter's own name first
  std::filesystem::path python_path;   ///< to stand first in PYTHONPATH; empty: nothing to add
};

/// `python -m MODULE ARGUMENTS...`. The interpreter is the python3 beside the program (an
/// installed package), else `built_with` (a tree).
/// Throws:  std::runtime_error if neither is there.
PythonInvocation python_invocation(const SourceTree& tree, const std::filesystem::path& built_with,
                                   std::string_view module,
                                   const std::vector<std::string>& arguments);

/// Replaces this process: signals and the exit code are Python's own, nothing stands between.
/// Throws:  std::runtime_error if the interpreter cannot be started; else does not return.
[[noreturn]] void exec_python(const PythonInvocation& invocation);

}  // namespace bagualu
