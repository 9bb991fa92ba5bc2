#include "bagualu/model/shell_script.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/model/shell_words.h"

namespace bagualu {
namespace {

constexpr int kMaxDepth = 64;
using Kind = ShellToken::Kind;

/// What a command leaves, and whether a branch is taken.
enum class Truth : uint8_t { kNo, kYes, kUnknown };

Truth negated(Truth truth) {
  if (truth == Truth::kUnknown) return truth;
  return truth == Truth::kYes ? Truth::kNo : Truth::kYes;
}
/// Of a branch inside another.
Truth both(Truth outer, Truth inner) {
  if (outer == Truth::kNo || inner == Truth::kNo) return Truth::kNo;
  return outer == Truth::kYes ? inner : Truth::kUnknown;
}
Truth truth_of(bool yes) { return yes ? Truth::kYes : Truth::kNo; }

bool is_one_of(std::string_view word, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

/// "a = b", "-n a", "! ..." as words of [ ] or test.
Truth test_words(std::vector<std::string> words) {
  if (words.empty()) return Truth::kNo;
  if (words[0] == "!") {
    words.erase(words.begin());
    return negated(test_words(std::move(words)));
  }
  if (words.size() == 1) return truth_of(!words[0].empty());
  if (words.size() == 2) {
    if (words[0] == "-n") return truth_of(!words[1].empty());
    if (words[0] == "-z") return truth_of(words[1].empty());
    return Truth::kUnknown;
  }
  if (words.size() != 3) return Truth::kUnknown;
  const std::string& op = words[1];
  if (op == "=" || op == "==") return truth_of(words[0] == words[2]);
  if (op == "!=") return truth_of(words[0] != words[2]);
  int64_t a = 0;
  int64_t b = 0;
  for (const auto& [word, value] : {std::pair{&words[0], &a}, std::pair{&words[2], &b}}) {
    const char* end = word->data() + word->size();
    if (word->empty() || std::from_chars(word->data(), end, *value).ptr != end) {
      return Truth::kUnknown;
    }
  }
  if (op == "-eq") return truth_of(a == b);
  if (op == "-ne") return truth_of(a != b);
  if (op == "-lt") return truth_of(a < b);
  if (op == "-le") return truth_of(a <= b);
  if (op == "-gt") return truth_of(a > b);
  if (op == "-ge") return truth_of(a >= b);
  return Truth::kUnknown;
}

class Follower {
 public:
  Follower(std::string_view text, const std::string& where,
           const std::map<std::string, std::string>& given)
      : where_(where), tokens_(shell_tokens(text, where)), variables_(given) {}

  ShellResult run() {
    list(Truth::kYes, 0, {});
    if (peek().kind != Kind::kEnd) fail("a command");
    for (const std::string& name : variables_.names()) {
      ShellExpander expander(&variables_, where_);
      result_.variables.push_back({name, expander.fields("${" + name + "[@]}")});
    }
    return std::move(result_);
  }

 private:
  const ShellToken& peek() const { return tokens_[at_]; }
  bool is_word(std::string_view text) const {
    return peek().kind == Kind::kWord && peek().text == text;
  }
  bool is_operator(std::string_view text) const {
    return peek().kind == Kind::kOperator && peek().text == text;
  }
  void next() {
    if (peek().kind != Kind::kEnd) ++at_;
  }
  void expect_word(std::string_view text) {
    if (!is_word(text)) fail(text);
    next();
  }
  void skip_newlines() {
    while (peek().kind == Kind::kNewline || is_operator(";")) next();
  }
  [[noreturn]] void fail(std::string_view wanted) const {
    const std::string found = peek().kind == Kind::kWord || peek().kind == Kind::kOperator
                                  ? peek().text.substr(0, 40)
                                  : std::string("the end of a line or file");
    throw InvalidInput(where_, fmt::format("line {}", peek().line), found,
                       fmt::format("{} (what a shell script has there)", wanted));
  }

  /// Commands up to one of `ends` where a command would begin; the last one's truth.
  Truth list(Truth mode, int depth, std::initializer_list<std::string_view> ends) {
    if (depth > kMaxDepth) fail("at most 64 levels of nesting");
    Truth last = Truth::kYes;
    while (true) {
      while (peek().kind == Kind::kNewline || is_operator(";") || is_operator("&")) next();
      if (peek().kind == Kind::kEnd) return last;
      if (is_one_of(peek().text, ends)) return last;
      last = chain(mode, depth);
    }
  }

  /// One command and those joined to it by && || |.
  Truth chain(Truth mode, int depth) {
    Truth last = statement(mode, depth);
    while (true) {
      const bool piped = is_operator("|");
      const bool wants = is_operator("&&");
      if (!piped && !wants && !is_operator("||")) return last;
      next();
      skip_newlines();
      if (piped) {
        statement(mode, depth);
        last = Truth::kUnknown;
        continue;
      }
      const Truth taken = wants ? last : negated(last);
      const Truth right = statement(both(mode, taken), depth);
      if (taken == Truth::kYes) last = right;
      if (taken == Truth::kUnknown) last = Truth::kUnknown;
    }
  }

  Truth statement(Truth mode, int depth) {
    if (is_word("!")) {
      next();
      return negated(statement_once(mode, depth + 1));
    }
    return statement_once(mode, depth);
  }

  Truth statement_once(Truth mode, int depth) {
    if (depth > kMaxDepth) fail("at most 64 levels of nesting");
    if (is_word("if")) return if_statement(mode, depth);
    if (is_word("for") || is_word("select") || is_word("while") || is_word("until")) {
      return loop(mode, depth);
    }
    if (is_word("case")) return case_statement(mode, depth);
    if (is_word("[[")) return double_test();
    if (is_word("{")) {
      next();
      const Truth last = list(mode, depth + 1, {"}"});
      expect_word("}");
      skip_redirections();
      return last;
    }
    if (is_operator("(")) return parenthesis(mode, depth);
    if (is_word("function")) {
      next();
      next();
      if (is_operator("(")) take_parentheses();
      skip_newlines();
      return statement_once(mode, depth + 1);
    }
    return simple(mode, depth);
  }

  Truth if_statement(Truth mode, int depth) {
    next();
    Truth left = mode;  // of the branches still to come
    Truth condition = list(left, depth + 1, {"then"});
    expect_word("then");
    list(both(left, condition), depth + 1, {"elif", "else", "fi"});
    left = both(left, negated(condition));
    while (is_word("elif")) {
      next();
      condition = list(left, depth + 1, {"then"});
      expect_word("then");
      list(both(left, condition), depth + 1, {"elif", "else", "fi"});
      left = both(left, negated(condition));
    }
    if (is_word("else")) {
      next();
      list(left, depth + 1, {"fi"});
    }
    expect_word("fi");
    skip_redirections();
    return Truth::kUnknown;
  }

  /// What a loop sets depends on how often it runs: doubtful.
  Truth loop(Truth mode, int depth) {
    const bool lists = is_word("for") || is_word("select");
    const Truth inside = both(mode, Truth::kUnknown);
    next();
    if (lists && is_operator("(")) {
      take_parentheses();
    } else if (lists) {
      if (peek().kind != Kind::kWord) fail("a variable");
      if (inside != Truth::kNo && is_shell_name(peek().text)) {
        variables_.set(peek().text, {}, false, peek().line, where_);
      }
      while (peek().kind == Kind::kWord && !is_word("do")) next();
    } else {
      list(inside, depth + 1, {"do"});
    }
    skip_newlines();
    expect_word("do");
    list(inside, depth + 1, {"done"});
    expect_word("done");
    skip_redirections();
    return Truth::kUnknown;
  }

  Truth case_statement(Truth mode, int depth) {
    next();
    ShellExpander expander(&variables_, where_);
    const std::string word = expander.joined(peek().text);
    const bool known = !expander.used_position() && expander.doubtful().empty();
    next();
    skip_newlines();
    expect_word("in");
    Truth left = known ? mode : both(mode, Truth::kUnknown);
    while (true) {
      skip_newlines();
      if (is_word("esac") || peek().kind == Kind::kEnd) break;
      if (is_operator("(")) next();
      bool matches = false;
      while (!is_operator(")")) {
        if (peek().kind == Kind::kEnd || peek().kind == Kind::kNewline) fail(")");
        if (peek().kind == Kind::kWord) {
          const std::string pattern = expander.joined(peek().text);
          matches = matches || fnmatch(pattern.c_str(), word.c_str(), 0) == 0;
        }
        next();
      }
      next();
      const Truth taken = known ? both(left, truth_of(matches)) : left;
      list(taken, depth + 1, {";;", "esac"});
      if (known && matches) left = Truth::kNo;
      if (is_operator(";;")) next();
    }
    expect_word("esac");
    return Truth::kUnknown;
  }

  /// [[ ... ]]: tests joined by && or || from the left; others are not known.
  Truth double_test() {
    next();
    Truth all = Truth::kUnknown;
    std::string joint;
    ShellExpander expander(&variables_, where_);
    std::vector<std::string> words;
    bool hard = false;
    const auto close = [&] {
      const Truth one = hard ? Truth::kUnknown : test_words(std::exchange(words, {}));
      words.clear();
      hard = false;
      if (joint.empty()) {
        all = one;
      } else if (joint == "&&") {
        all = both(all, one);
      } else {
        all = negated(both(negated(all), negated(one)));
      }
    };
    while (!is_word("]]")) {
      if (peek().kind == Kind::kEnd) fail("]]");
      if (is_operator("&&") || is_operator("||")) {
        close();
        joint = peek().text;
      } else if (peek().kind == Kind::kWord) {
        words.push_back(expander.joined(peek().text));
        hard = hard || (words.size() == 3 && words[2].find_first_of("*?[") != std::string::npos);
      } else if (peek().kind == Kind::kOperator) {
        hard = true;
      }
      next();
    }
    next();
    close();
    return expander.used_position() || !expander.doubtful().empty() ? Truth::kUnknown : all;
  }

  /// ( list ), or (( arithmetic )), which is not known.
  Truth parenthesis(Truth mode, int depth) {
    const bool counts = tokens_[std::min(at_ + 1, tokens_.size() - 1)].text == "(" &&
                        tokens_[std::min(at_ + 1, tokens_.size() - 1)].joined;
    if (counts) {
      take_parentheses();
      return Truth::kUnknown;
    }
    next();
    const Truth last = list(mode, depth + 1, {")"});
    if (!is_operator(")")) fail(")");
    next();
    skip_redirections();
    return last;
  }

  void take_parentheses() {
    int level = 0;
    do {
      if (is_operator("(")) ++level;
      if (is_operator(")")) --level;
      if (peek().kind == Kind::kEnd) fail(")");
      next();
    } while (level > 0);
  }

  bool at_redirection() const {
    return peek().kind == Kind::kOperator &&
           is_one_of(peek().text, {"<", ">", ">>", "<<", "<<-", "<<<", "&>", "&>>", ">&", "<&"});
  }
  void skip_redirections() {
    while (at_redirection()) {
      next();
      if (peek().kind == Kind::kWord) next();
    }
  }

  /// NAME=value, NAME+=value, NAME=( ... ). False: the word is not an assignment.
  bool assignment(Truth mode, ShellExpander* expander) {
    const ShellToken token = peek();
    const size_t equals = token.text.find('=');
    if (equals == std::string::npos || equals == 0) return false;
    std::string name = token.text.substr(0, equals);
    const bool append = name.back() == '+';
    if (append) name.pop_back();
    if (!is_shell_name(name)) return false;
    next();
    std::vector<std::string> values;
    if (equals + 1 == token.text.size() && is_operator("(") && peek().joined) {
      next();
      while (!is_operator(")")) {
        if (peek().kind == Kind::kEnd) fail(")");
        if (peek().kind == Kind::kWord) {
          const std::vector<std::string> more = expander->fields(peek().text);
          values.insert(values.end(), more.begin(), more.end());
        }
        next();
      }
      next();
      store(mode, name, std::move(values), append, token.line, *expander);
      return true;
    }
    values = {expander->joined(std::string_view(token.text).substr(equals + 1))};
    const std::vector<std::string>* held = variables_.find(name);
    if (append && held != nullptr && held->size() == 1) {
      values[0] = held->front() + values[0];
      const int64_t doubt = variables_.doubt_line(name);
      store(mode, name, std::move(values), false, doubt > 0 ? doubt : token.line, *expander,
            doubt > 0);
      return true;
    }
    store(mode, name, std::move(values), append, token.line, *expander);
    return true;
  }

  void store(Truth mode, const std::string& name, std::vector<std::string> values, bool append,
             int64_t line, const ShellExpander& expander, bool doubtful = false) {
    if (mode == Truth::kNo) return;
    doubtful = doubtful || mode == Truth::kUnknown || !expander.doubtful().empty();
    variables_.set(name, std::move(values), append, doubtful ? line : 0, where_);
  }

  Truth simple(Truth mode, int depth) {
    if (is_one_of(peek().text, {"then", "elif", "else", "fi", "do", "done", "esac", "}"})) {
      fail("a command");
    }
    const int64_t line = peek().line;
    const size_t begin = at_;
    ShellExpander expander(&variables_, where_);
    while (peek().kind == Kind::kWord && assignment(mode, &expander)) {
    }
    if (at_ > begin && peek().kind != Kind::kWord) return Truth::kYes;
    if (is_one_of(peek().text, {"export", "declare", "local", "readonly", "typeset"})) {
      next();
      while (peek().kind == Kind::kWord) {
        if (!assignment(mode, &expander)) next();
      }
      return Truth::kYes;
    }
    ShellCommand command;
    command.line = line;
    while (peek().kind == Kind::kWord || at_redirection() || is_operator("(")) {
      if (at_redirection()) {
        skip_redirections();
      } else if (is_operator("(")) {
        take_parentheses();
        skip_newlines();
        return statement_once(mode, depth + 1);  // the body of name()
      } else {
        const std::vector<std::string> fields = expander.fields(peek().text);
        const bool descriptor = peek().text.find_first_not_of("0123456789") == std::string::npos;
        next();
        if (descriptor && at_redirection() && peek().joined) continue;  // as in 2>&1
        command.words.insert(command.words.end(), fields.begin(), fields.end());
      }
    }
    if (at_ == begin) fail("a command");
    return started(mode, std::move(command), expander);
  }

  Truth started(Truth mode, ShellCommand command, const ShellExpander& expander) {
    if (command.words.empty()) return Truth::kYes;
    const std::string name = command.words.front();
    const bool known = !expander.used_position() && expander.doubtful().empty();
    if (name == "[" || name == "test") {
      command.words.erase(command.words.begin());
      if (name == "[" && !command.words.empty()) command.words.pop_back();
      return known ? test_words(std::move(command.words)) : Truth::kUnknown;
    }
    if (name == "false") return Truth::kNo;
    command.doubtful = expander.doubtful();
    command.doubtful_line = variables_.doubt_line(command.doubtful);
    if (mode != Truth::kNo) result_.commands.push_back(std::move(command));
    const bool succeeds = is_one_of(name, {":", "true", "cd", "echo", "set", "mkdir", "ulimit",
                                           "source", ".", "module", "pushd", "popd"});
    return succeeds ? Truth::kYes : Truth::kUnknown;
  }

  const std::string& where_;
  std::vector<ShellToken> tokens_;
  size_t at_ = 0;
  ShellVariables variables_;
  ShellResult result_;
};

}  // namespace

ShellResult follow_shell_script(std::string_view text, const std::string& where,
                                const std::map<std::string, std::string>& variables) {
  return Follower(text, where, variables).run();
}

}  // namespace bagualu
