#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace bagualu {

/// One command that a script would start.
struct ShellCommand {
  std::vector<std::string> words;
  int64_t line = 1;
  /// A variable among its words whose value cannot be known, and the line that set it.
  std::string doubtful;
  int64_t doubtful_line = 0;
};

struct ShellList {
  std::string name;
  std::vector<std::string> words;  ///< split at white space
};

struct ShellResult {
  std::vector<ShellCommand> commands;  ///< in order, but for those of branches not taken
  std::vector<ShellList> variables;    ///< what the script set, in order
};

/// Note [Shell scripts]
/// A launch script is followed, not started: assignments, arrays, ${A:-word} and $((1 + 2)), if
/// with tests of strings and numbers, case. Variables that nobody set are empty, as in a shell
/// without them. What depends on files, on other programs or on the script's own arguments is not
/// known: what such branches and loops set is doubtful, and a command that uses it is marked.
/// Functions are followed where they are defined; eval, source and $(command) are not. Throws:
/// InvalidInput(where, "line N") on a script that does not parse.
ShellResult follow_shell_script(std::string_view text, const std::string& where,
                                const std::map<std::string, std::string>& variables);

}  // namespace bagualu
