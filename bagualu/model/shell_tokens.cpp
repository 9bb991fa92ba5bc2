#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/model/shell_words.h"

namespace bagualu {
namespace {

constexpr size_t kMaxScript = size_t{1} << 20;

class Tokenizer {
 public:
  Tokenizer(std::string_view text, const std::string& where) : text_(text), where_(where) {}

  std::vector<ShellToken> run() {
    while (at_ < text_.size()) {
      const char symbol = text_[at_];
      if (symbol == ' ' || symbol == '\t' || symbol == '\r') {
        ++at_;
        spaced_ = true;
      } else if (continues()) {
        skip_continuation();
      } else if (symbol == '\n') {
        push(ShellToken::Kind::kNewline, "\n");
        ++at_;
        ++line_;
        skip_documents();
      } else if (symbol == '#') {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (!take_operator()) {
        take_word();
      }
    }
    push(ShellToken::Kind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  void push(ShellToken::Kind kind, std::string text) {
    tokens_.push_back({kind, std::move(text), line_, !spaced_});
    spaced_ = kind == ShellToken::Kind::kNewline;
  }

  bool continues() const {
    return text_.substr(at_, 2) == "\\\n" || text_.substr(at_, 3) == "\\\r\n";
  }
  void skip_continuation() {
    at_ = text_.find('\n', at_) + 1;
    ++line_;
  }

  bool take_operator() {
    constexpr std::array<std::string_view, 17> kOperators = {"<<<", "<<-", "&>>", "&&", "||", ";;",
                                                             "<<",  ">>",  "&>",  ">&", "<&", ";",
                                                             "&",   "|",   "(",   ")",  "<"};
    for (const std::string_view op : kOperators) {
      if (text_.substr(at_, op.size()) == op) return take_operator(op);
    }
    return text_[at_] == '>' && take_operator(">");
  }

  bool take_operator(std::string_view op) {
    push(ShellToken::Kind::kOperator, std::string(op));
    at_ += op.size();
    wants_delimiter_ = op == "<<" || op == "<<-";
    return true;
  }

  void take_word() {
    const int64_t line = line_;
    std::string word;
    while (at_ < text_.size()) {
      if (continues()) {
        skip_continuation();
        continue;
      }
      const char symbol = text_[at_];
      constexpr std::string_view kEnds = " \t\r\n;&|()<>";
      if (kEnds.find(symbol) != std::string_view::npos) break;
      take_piece(&word, line);
    }
    if (std::exchange(wants_delimiter_, false)) {
      std::string delimiter = word;
      std::erase_if(delimiter, [](char c) { return c == '\'' || c == '"' || c == '\\'; });
      documents_.push_back(delimiter);
    }
    push(ShellToken::Kind::kWord, std::move(word));
    tokens_.back().line = line;
  }

  /// One symbol of a word, or one quoted or bracketed piece with what encloses it.
  void take_piece(std::string* word, int64_t line) {
    const char symbol = text_[at_];
    if (symbol == '\\') {
      word->append(text_.substr(at_, 2));
      at_ = std::min(at_ + 2, text_.size());
    } else if (symbol == '\'' || symbol == '`') {
      take_until(symbol, word, line);
    } else if (symbol == '"') {
      take_double_quoted(word, line, 0);
    } else if (symbol == '$' && at_ + 1 < text_.size() &&
               (text_[at_ + 1] == '{' || text_[at_ + 1] == '(')) {
      take_bracketed(word, line, 0);
    } else {
      take_symbol(word);
    }
  }

  void take_symbol(std::string* word) {
    if (text_[at_] == '\n') ++line_;
    word->push_back(text_[at_++]);
  }

  void take_until(char close, std::string* word, int64_t line) {
    take_symbol(word);
    while (at_ < text_.size() && text_[at_] != close) take_symbol(word);
    if (at_ >= text_.size()) fail(line, fmt::format("{} without its end", close));
    take_symbol(word);
  }

  void take_double_quoted(std::string* word, int64_t line, int depth) {
    take_symbol(word);
    while (at_ < text_.size() && text_[at_] != '"') {
      if (continues()) {
        skip_continuation();
      } else if (text_[at_] == '\\' && at_ + 1 < text_.size()) {
        take_symbol(word);
        take_symbol(word);
      } else if (text_[at_] == '$' && at_ + 1 < text_.size() &&
                 (text_[at_ + 1] == '{' || text_[at_ + 1] == '(')) {
        take_bracketed(word, line, depth + 1);
      } else {
        take_symbol(word);
      }
    }
    if (at_ >= text_.size()) fail(line, "\" without its end");
    take_symbol(word);
  }

  /// ${...}, $(...) and $((...)).
  void take_bracketed(std::string* word, int64_t line, int depth) {
    if (depth > 32) fail(line, "brackets and quotes nested more than 32 deep");
    take_symbol(word);
    const char open = text_[at_];
    const char close = open == '{' ? '}' : ')';
    int level = 0;
    while (at_ < text_.size()) {
      const char symbol = text_[at_];
      if (symbol == '\'' && open == '(') {
        take_until('\'', word, line);
        continue;
      }
      if (symbol == '"') {
        take_double_quoted(word, line, depth + 1);
        continue;
      }
      if (symbol == open) ++level;
      if (symbol == close) --level;
      take_symbol(word);
      if (level == 0) return;
    }
    fail(line, fmt::format("${} without its end", open));
  }

  void skip_documents() {
    for (const std::string& delimiter : std::exchange(documents_, {})) {
      while (at_ < text_.size()) {
        const size_t end = std::min(text_.find('\n', at_), text_.size());
        std::string_view content = text_.substr(at_, end - at_);
        content.remove_prefix(std::min(content.find_first_not_of('\t'), content.size()));
        at_ = std::min(end + 1, text_.size());
        ++line_;
        if (content == delimiter) break;
      }
    }
  }

  [[noreturn]] void fail(int64_t line, std::string found) const {
    throw InvalidInput(where_, fmt::format("line {}", line), std::move(found),
                       "a shell script whose quotes and brackets match");
  }

  std::string_view text_;
  const std::string& where_;
  size_t at_ = 0;
  int64_t line_ = 1;
  bool spaced_ = true;
  bool wants_delimiter_ = false;
  std::vector<std::string> documents_;
  std::vector<ShellToken> tokens_;
};

}  // namespace

std::vector<ShellToken> shell_tokens(std::string_view text, const std::string& where) {
  if (text.size() > kMaxScript) {
    throw InvalidInput(where, "size", fmt::format("{} bytes", text.size()), "at most 1 MiB");
  }
  return Tokenizer(text, where).run();
}

}  // namespace bagualu
