#include "bagualu/cli/python_command.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace bagualu {
namespace fs = std::filesystem;

namespace {

bool is_program(const fs::path& path) { return ::access(path.c_str(), X_OK) == 0; }

}  // namespace

PythonInvocation python_invocation(const SourceTree& tree, const fs::path& built_with,
                                   std::string_view module,
                                   const std::vector<std::string>& arguments) {
  PythonInvocation invocation;
  const fs::path beside = tree.program.parent_path() / "python3";
  invocation.python = is_program(beside) ? beside : built_with;
  if (!is_program(invocation.python)) {
    throw std::runtime_error(
        fmt::format("no Python at {} or {}; 'make build' in the source tree "
                    "sets one up",
                    beside.string(), built_with.string()));
  }
  invocation.arguments = {invocation.python.string(), "-m", std::string(module)};
  invocation.arguments.insert(invocation.arguments.end(), arguments.begin(), arguments.end());
  if (!tree.root.empty()) invocation.python_path = tree.root / "python";
  return invocation;
}

void exec_python(const PythonInvocation& invocation) {
  if (!invocation.python_path.empty()) {
    std::string path = invocation.python_path.string();
    const char* inherited = std::getenv("PYTHONPATH");
    if (inherited != nullptr && *inherited != '\0') path += std::string(":") + inherited;
    ::setenv("PYTHONPATH", path.c_str(), 1);
  }
  std::vector<char*> argv;
  for (const std::string& argument : invocation.arguments) {
    argv.push_back(const_cast<char*>(argument.c_str()));  // execv's signature is C's
  }
  argv.push_back(nullptr);
  ::execv(invocation.python.c_str(), argv.data());
  throw std::runtime_error(
      fmt::format("cannot start {}: {}", invocation.python.string(), std::strerror(errno)));
}

}  // namespace bagualu
