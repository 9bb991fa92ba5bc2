#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/model/shell_words.h"

namespace bagualu {
namespace {

constexpr size_t kMaxBytes = size_t{1} << 20;
constexpr size_t kMaxCharged = size_t{64} << 20;
constexpr int kMaxDepth = 32;
constexpr std::string_view kSpace = " \t\n\r";

bool name_start(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool digit(char c) { return c >= '0' && c <= '9'; }

size_t name_end(std::string_view text, size_t at) {
  if (at >= text.size() || !name_start(text[at])) return at;
  while (at < text.size() && (name_start(text[at]) || digit(text[at]))) ++at;
  return at;
}

/// Past the bracket that closes the one at `at`; quotes and escapes are skipped.
size_t closing(std::string_view text, size_t at) {
  const char open = text[at];
  const char close = open == '{' ? '}' : ')';
  int level = 0;
  for (; at < text.size(); ++at) {
    if (text[at] == '\\') {
      ++at;
    } else if (text[at] == open) {
      ++level;
    } else if (text[at] == close && --level == 0) {
      return at + 1;
    }
  }
  return text.size();
}

/// Integers with + - * / % and parentheses; nothing on anything else or overflow.
class Arithmetic {
 public:
  explicit Arithmetic(std::string_view text) : text_(text) {}

  std::optional<int64_t> evaluate() {
    const int64_t value = sum(0);
    skip();
    if (at_ != text_.size()) ok_ = false;
    return ok_ ? std::optional<int64_t>(value) : std::nullopt;
  }

 private:
  int64_t sum(int depth) {
    int64_t left = product(depth);
    while (ok_) {
      if (take('+')) {
        if (__builtin_add_overflow(left, product(depth), &left)) ok_ = false;
      } else if (take('-')) {
        if (__builtin_sub_overflow(left, product(depth), &left)) ok_ = false;
      } else {
        break;
      }
    }
    return left;
  }

  int64_t product(int depth) {
    int64_t left = unit(depth);
    while (ok_) {
      if (take('*')) {
        if (__builtin_mul_overflow(left, unit(depth), &left)) ok_ = false;
      } else if (take('/')) {
        left = divided(left, unit(depth), false);
      } else if (take('%')) {
        left = divided(left, unit(depth), true);
      } else {
        break;
      }
    }
    return left;
  }

  int64_t divided(int64_t left, int64_t right, bool rest) {
    if (right == 0 || right == -1) {
      ok_ = ok_ && right == -1 && left != INT64_MIN;
      return ok_ ? (rest ? 0 : -left) : 0;
    }
    return rest ? left % right : left / right;
  }

  int64_t unit(int depth) {
    if (depth > kMaxDepth) ok_ = false;
    if (!ok_) return 0;
    if (take('-')) {
      int64_t negative = 0;
      if (__builtin_sub_overflow(int64_t{0}, unit(depth + 1), &negative)) ok_ = false;
      return negative;
    }
    if (take('(')) {
      const int64_t value = sum(depth + 1);
      if (!take(')')) ok_ = false;
      return value;
    }
    skip();
    int64_t value = 0;
    const auto [end, error] =
        std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
    if (error != std::errc{}) ok_ = false;
    at_ = static_cast<size_t>(end - text_.data());
    return value;
  }

  void skip() { at_ = std::min(text_.find_first_not_of(kSpace, at_), text_.size()); }
  bool take(char symbol) {
    skip();
    if (at_ >= text_.size() || text_[at_] != symbol) return false;
    ++at_;
    return true;
  }

  std::string_view text_;
  size_t at_ = 0;
  bool ok_ = true;
};

}  // namespace

bool is_shell_name(std::string_view text) {
  return !text.empty() && name_end(text, 0) == text.size();
}

ShellVariables::ShellVariables(const std::map<std::string, std::string>& given) {
  for (const auto& [name, value] : given) {
    values_[name] = {value};
    given_.insert(name);
  }
}

const std::vector<std::string>* ShellVariables::find(std::string_view name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? nullptr : &found->second;
}

int64_t ShellVariables::doubt_line(std::string_view name) const {
  const auto found = doubt_.find(name);
  return found == doubt_.end() ? 0 : found->second;
}

void ShellVariables::set(const std::string& name, std::vector<std::string> values, bool append,
                         int64_t doubt_line, const std::string& where) {
  // What the caller said settles what cannot be known.
  if (doubt_line > 0 && given_.contains(name)) return;
  std::vector<std::string>& held = values_[name];
  if (append && doubt_line == 0) doubt_line = this->doubt_line(name);
  if (append) values.insert(values.begin(), held.begin(), held.end());
  size_t bytes = 0;
  for (const std::string& value : values) bytes += value.size() + sizeof(std::string);
  if (bytes > kMaxBytes) {
    throw InvalidInput(where, name, "a value beyond 1 MiB", "variables of at most 1 MiB");
  }
  charge(bytes, where);
  held = std::move(values);
  if (doubt_line > 0) {
    doubt_[name] = doubt_line;
  } else {
    doubt_.erase(name);
  }
  if (named_.insert(name).second) order_.push_back(name);
}

void ShellVariables::charge(size_t bytes, const std::string& where) {
  charged_bytes_ += bytes;
  if (charged_bytes_ > kMaxCharged) {
    throw InvalidInput(where, "${...}", "words beyond 64 MiB", "at most 64 MiB in all");
  }
}

std::vector<std::string> ShellExpander::fields(std::string_view word) {
  fields_.clear();
  run(word, /*split=*/true, 0);
  end_field();
  return std::move(fields_);
}

std::string ShellExpander::joined(std::string_view word) { return nested(word, 0); }

std::string ShellExpander::nested(std::string_view word, int depth) {
  if (depth > kMaxDepth) {
    throw InvalidInput(where_, "${...}", "more than 32 levels", "at most 32 levels");
  }
  Values outer = std::exchange(fields_, {});
  std::string current = std::exchange(current_, {});
  const bool has_current = std::exchange(has_current_, false);
  run(word, /*split=*/false, depth);
  end_field();
  std::string made = fmt::format("{}", fmt::join(fields_, " "));
  fields_ = std::move(outer);
  current_ = std::move(current);
  has_current_ = has_current;
  return made;
}

void ShellExpander::run(std::string_view word, bool split, int depth) {
  bool quoted = false;
  for (size_t at = 0; at < word.size();) {
    const char symbol = word[at];
    if (symbol == '\\' && at + 1 < word.size()) {
      const bool keeps =
          quoted && std::string_view("$`\"\\").find(word[at + 1]) == std::string_view::npos;
      add_text(word.substr(keeps ? at : at + 1, keeps ? 2 : 1));
      at += 2;
    } else if (symbol == '\'' && !quoted) {
      const size_t end = std::min(word.find('\'', at + 1), word.size());
      add_text(word.substr(at + 1, end - at - 1));
      at = end + 1;
    } else if (symbol == '"') {
      quoted = !quoted;
      add_text("");
      ++at;
    } else if (symbol == '`') {
      const size_t end = std::min(word.find('`', at + 1), word.size() - 1);
      add_text(word.substr(at, end - at + 1));
      at = end + 1;
    } else if (symbol == '$') {
      at = dollar(word, at, quoted, split, depth);
    } else {
      add_text(word.substr(at, 1));
      ++at;
    }
  }
}

size_t ShellExpander::dollar(std::string_view word, size_t at, bool quoted, bool split, int depth) {
  const size_t next = at + 1;
  if (next >= word.size()) {
    add_text("$");
    return next;
  }
  bool every = false;
  Values values;
  size_t end = next + 1;
  if (word[next] == '(') {
    end = closing(word, next);
    const std::string_view whole = word.substr(at, end - at);
    const bool counts = whole.starts_with("$((") && whole.ends_with("))");
    const std::optional<int64_t> value =
        counts ? arithmetic(whole.substr(3, whole.size() - 5), depth) : std::nullopt;
    add_text(value ? std::to_string(*value) : std::string(whole));
    return end;
  }
  if (word[next] == '{') {
    end = closing(word, next);
    values = braced(word.substr(next + 1, end - std::min(end, next + 2)), depth, &every);
  } else if (name_start(word[next])) {
    end = name_end(word, next);
    values = variable(word.substr(next, end - next));
    values.resize(std::min<size_t>(values.size(), 1));
  } else if (digit(word[next]) ||
             std::string_view("@*#?$!-").find(word[next]) != std::string_view::npos) {
    used_position_ = true;
  } else {
    add_text("$");
    return next;
  }
  add(values, every, quoted, split);
  return end;
}

ShellExpander::Values ShellExpander::variable(std::string_view name) {
  if (doubtful_.empty() && variables_->doubt_line(name) > 0) doubtful_ = name;
  const Values* found = variables_->find(name);
  return found == nullptr ? Values() : *found;
}

ShellExpander::Values ShellExpander::braced(std::string_view inner, int depth, bool* every) {
  const Values as_written = {fmt::format("${{{}}}", inner)};
  const bool length = inner.starts_with('#') && inner.size() > 1;
  const std::string_view text = length ? inner.substr(1) : inner;
  size_t end = name_end(text, 0);
  Values values;
  const bool position = end == 0 && !text.empty() &&
                        (digit(text[0]) || text[0] == '@' || text[0] == '*' || text[0] == '#');
  if (position) {
    used_position_ = true;
    end = 1;
    while (end < text.size() && digit(text[end]) && digit(text[0])) ++end;
  } else if (end == 0) {
    return as_written;
  } else {
    values = variable(text.substr(0, end));
  }
  std::string_view rest = text.substr(end);
  if (rest.starts_with("[@]") || rest.starts_with("[*]")) {
    *every = true;
    rest.remove_prefix(3);
  } else if (rest.starts_with('[')) {
    const size_t close = rest.find(']');
    if (close == std::string_view::npos) return as_written;
    const std::optional<int64_t> index = arithmetic(rest.substr(1, close - 1), depth);
    const bool inside = index && *index >= 0 && *index < static_cast<int64_t>(values.size());
    values = inside ? Values{values[static_cast<size_t>(*index)]} : Values();
    rest.remove_prefix(close + 1);
  } else {
    values.resize(std::min<size_t>(values.size(), 1));
  }
  if (length) {
    *every = false;
    const size_t size = rest.empty() && !values.empty() ? values[0].size() : 0;
    return {std::to_string(text.find('[') != std::string_view::npos ? values.size() : size)};
  }
  if (rest.empty()) return values;
  const bool colon = rest.starts_with(':');
  if (colon) rest.remove_prefix(1);
  constexpr std::string_view kForms = "-=+?";
  if (rest.empty() || kForms.find(rest[0]) == std::string_view::npos) return as_written;
  const bool empty = values.empty() || (colon && values.size() == 1 && values[0].empty());
  const bool takes_word = rest[0] == '+' ? !empty : empty && rest[0] != '?';
  if (!takes_word) return rest[0] == '+' ? Values() : values;
  *every = false;
  const std::string word = nested(rest.substr(1), depth + 1);
  const std::string name(text.substr(0, end));
  if (rest[0] == '=' && !position) variables_->set(name, {word}, false, 0, where_);
  return {word};
}

std::optional<int64_t> ShellExpander::arithmetic(std::string_view text, int depth) {
  const std::string expanded = nested(text, depth + 1);
  std::string plain;
  for (size_t at = 0; at < expanded.size();) {
    const size_t end = name_end(expanded, at);
    if (end == at) {
      plain += expanded[at++];
      continue;
    }
    const Values values = variable(std::string_view(expanded).substr(at, end - at));
    const bool number = !values.empty() && !values[0].empty() &&
                        values[0].find_first_not_of("-0123456789") == std::string::npos;
    if (!values.empty() && !number) return std::nullopt;
    plain += values.empty() ? "0" : "(" + values[0] + ")";
    at = end;
  }
  return Arithmetic(plain).evaluate();
}

void ShellExpander::add(const Values& values, bool every, bool quoted, bool split) {
  if (quoted || !split) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (i > 0 && every && quoted && split) {
        end_field();
      } else if (i > 0) {
        add_text(" ");
      }
      add_text(values[i]);
    }
    return;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) end_field();
    const std::string& value = values[i];
    for (size_t at = 0; at < value.size();) {
      const size_t begin = value.find_first_not_of(kSpace, at);
      if (begin != at) end_field();
      if (begin == std::string::npos) break;
      const size_t end = std::min(value.find_first_of(kSpace, begin), value.size());
      add_text(std::string_view(value).substr(begin, end - begin));
      at = end;
    }
  }
}

void ShellExpander::add_text(std::string_view text) {
  variables_->charge(text.size() + 1, where_);
  current_ += text;
  has_current_ = true;
}

void ShellExpander::end_field() {
  if (has_current_) fields_.push_back(std::move(current_));
  current_.clear();
  has_current_ = false;
}

}  // namespace bagualu
