#pragma once

// Words of a shell script and what stands for a variable in them.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace bagualu {

struct ShellToken {
  enum class Kind : uint8_t { kWord, kOperator, kNewline, kEnd };
  Kind kind = Kind::kEnd;
  std::string text;  ///< of a word: with its quotes, as written
  int64_t line = 1;
  bool joined = false;  ///< no space before it
};

/// Words, operators (; && || | & ( ) < > ...) and ends of lines, the last token kEnd. Comments,
/// continued lines and here-documents are left out.
/// Throws: InvalidInput(where, "line N") on an open quote or bracket, or more than 1 MiB.
std::vector<ShellToken> shell_tokens(std::string_view text, const std::string& where);

/// Variables by name; a scalar has one value.
class ShellVariables {
 public:
  explicit ShellVariables(const std::map<std::string, std::string>& given);

  const std::vector<std::string>* find(std::string_view name) const;
  /// `doubt_line` > 0: whether it is set so cannot be known. Throws on values beyond 1 MiB.
  void set(const std::string& name, std::vector<std::string> values, bool append,
           int64_t doubt_line, const std::string& where);
  /// Line that made the variable doubtful; 0: none did.
  int64_t doubt_line(std::string_view name) const;
  /// Throws when a script has made more than 64 MiB of words and values in all.
  void charge(size_t bytes, const std::string& where);
  /// Names that the script set, in order.
  const std::vector<std::string>& names() const { return order_; }

 private:
  std::map<std::string, std::vector<std::string>, std::less<>> values_;
  std::map<std::string, int64_t, std::less<>> doubt_;
  std::set<std::string, std::less<>> given_;
  std::set<std::string, std::less<>> named_;
  std::vector<std::string> order_;
  size_t charged_bytes_ = 0;
};

/// What a word becomes: quotes removed, variables replaced, unquoted ones split at white space.
/// A variable that nobody set is empty, as in a shell; $(command) and forms of ${...} other than
/// ${A}, ${A[i]}, ${#A[@]}, and those with :- - := = :+ + :? ? stay as written.
class ShellExpander {
 public:
  ShellExpander(ShellVariables* variables, const std::string& where)
      : variables_(variables), where_(where) {}

  std::vector<std::string> fields(std::string_view word);
  std::string joined(std::string_view word);  ///< not split, as in an assignment

  /// A $1, $# or $@ was among what was expanded.
  bool used_position() const { return used_position_; }
  /// First doubtful variable among it; empty: none.
  const std::string& doubtful() const { return doubtful_; }

 private:
  using Values = std::vector<std::string>;

  void run(std::string_view word, bool split, int depth);
  size_t dollar(std::string_view word, size_t at, bool quoted, bool split, int depth);
  Values braced(std::string_view inner, int depth, bool* every);
  Values variable(std::string_view name);
  std::string nested(std::string_view word, int depth);
  std::optional<int64_t> arithmetic(std::string_view text, int depth);
  void add(const Values& values, bool every, bool quoted, bool split);
  void add_text(std::string_view text);
  void end_field();

  ShellVariables* variables_;
  const std::string& where_;
  Values fields_;
  std::string current_;
  bool has_current_ = false;
  bool used_position_ = false;
  std::string doubtful_;
};

/// Whether `text` is a name a shell variable may have.
bool is_shell_name(std::string_view text);

}  // namespace bagualu
