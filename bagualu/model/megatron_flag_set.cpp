#include "bagualu/model/megatron_flag_set.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "bagualu/base/error.h"
#include "bagualu/model/megatron_known.h"

namespace bagualu {
namespace {

constexpr size_t kMaxShownCharacters = 80;

std::string cut(std::string text) {
  if (text.size() > kMaxShownCharacters) text = text.substr(0, kMaxShownCharacters) + "...";
  return text;
}

std::string joined(std::string_view name, const std::vector<std::string>& values) {
  return values.empty() ? fmt::format("--{}", name)
                        : fmt::format("--{} {}", name, fmt::join(values, " "));
}

}  // namespace

std::vector<MegatronArgument> arguments_of_words(const std::vector<std::string>& words,
                                                 const std::string& where) {
  std::vector<MegatronArgument> arguments;
  for (const std::string& word : words) {
    if (!word.starts_with("--")) {
      if (!arguments.empty()) arguments.back().values.push_back(word);
      continue;
    }
    const size_t equals = word.find('=');
    std::string name = word.substr(2, equals == std::string::npos ? equals : equals - 2);
    if (name.empty() || name.front() == '-') {
      throw InvalidInput(where, cut(word), cut(word), "a flag: two dashes and a name");
    }
    arguments.push_back({std::move(name), {}});
    if (equals != std::string::npos) arguments.back().values.push_back(word.substr(equals + 1));
  }
  return arguments;
}

MegatronFlags::MegatronFlags(const std::vector<MegatronArgument>& arguments, std::string where)
    : where_(std::move(where)) {
  for (const MegatronArgument& argument : arguments) {
    const KnownMegatronFlag known = known_megatron_flag(argument.name);
    if (known.kind == MegatronFlagKind::kLauncher) continue;
    if (known.kind == MegatronFlagKind::kUnknown) {
      fail(argument.name, "an unknown flag",
           "Megatron's flags; nearest is --" + nearest_megatron_flag(cut(argument.name)));
    }
    if (known.kind == MegatronFlagKind::kRemoved) {
      fail(argument.name, "a flag that Megatron no longer has",
           fmt::format("--{} in its place", known.replacement));
    }
    const auto [at, first] = given_.insert({argument.name, argument.values});
    if (first) {
      order_.push_back(argument.name);
    } else if (at->second != argument.values) {
      ignored_.push_back(joined(argument.name, at->second) + " (given again later)");
      at->second = argument.values;
    }
  }
}

bool MegatronFlags::has(std::string_view name) const { return given_.find(name) != given_.end(); }

const std::vector<std::string>& MegatronFlags::values(std::string_view name) const {
  const auto found = given_.find(name);
  if (found == given_.end()) fail(name, "nothing", "a value: it is needed");
  return found->second;
}

std::string MegatronFlags::text(std::string_view name) const {
  const std::vector<std::string>& given = values(name);
  if (given.size() != 1) {
    fail(name, given.empty() ? "nothing" : fmt::format("{}", fmt::join(given, " ")), "one value");
  }
  return given.front();
}

bool MegatronFlags::on(std::string_view name) const {
  if (!has(name)) return false;
  const std::vector<std::string>& given = values(name);
  if (given.empty()) return true;
  fail(name, fmt::format("{}", fmt::join(given, " ")), "no value: it is a switch");
}

int64_t MegatronFlags::count(std::string_view name, int64_t min, int64_t max) const {
  const std::string word = text(name);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc{} || end != word.data() + word.size() || value < min || value > max) {
    fail(name, word,
         max == kMaxCount ? fmt::format("an integer of at least {}", min)
                          : fmt::format("an integer from {} to {}", min, max));
  }
  return value;
}

int64_t MegatronFlags::count_or(std::string_view name, int64_t fallback, int64_t min,
                                int64_t max) const {
  return has(name) ? count(name, min, max) : fallback;
}

double MegatronFlags::number_or(std::string_view name, double fallback, double min,
                                double max) const {
  if (!has(name)) return fallback;
  const std::string word = text(name);
  double value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc{} || end != word.data() + word.size() || !std::isfinite(value) ||
      value < min || value > max) {
    fail(name, word, fmt::format("a number from {} to {}", min, max));
  }
  return value;
}

std::string MegatronFlags::choice_or(std::string_view name, std::string fallback,
                                     const std::vector<std::string>& allowed) const {
  if (!has(name)) return fallback;
  std::string word = text(name);
  if (std::find(allowed.begin(), allowed.end(), word) == allowed.end()) {
    fail(name, word, fmt::format("{}", fmt::join(allowed, ", ")));
  }
  return word;
}

std::vector<std::string> MegatronFlags::list(std::string_view name) const {
  std::vector<std::string> items;
  if (!has(name)) return items;
  for (const std::string& value : values(name)) {
    std::string item;
    for (const char symbol : value + ",") {
      const bool separates = symbol == ',' || symbol == ' ' || symbol == '[' || symbol == ']' ||
                             symbol == '\'' || symbol == '"';
      if (!separates) {
        item += symbol;
      } else if (!item.empty()) {
        items.push_back(std::exchange(item, {}));
      }
    }
  }
  return items;
}

std::string MegatronFlags::as_given(std::string_view name) const {
  const auto found = given_.find(name);
  return found == given_.end() ? "nothing" : joined(name, found->second);
}

void MegatronFlags::fail(std::string_view name, std::string found, std::string allowed) const {
  throw InvalidInput(where_, cut(fmt::format("--{}", name)), cut(std::move(found)),
                     std::move(allowed));
}

void MegatronFlags::unmodelled_if(std::string_view name, bool matters) {
  if (has(name) && matters) unmodelled_.push_back(as_given(name));
}

void MegatronFlags::unmodelled_or_ignored(std::string_view name, bool matters) {
  if (has(name)) (matters ? unmodelled_ : ignored_).push_back(as_given(name));
}

void MegatronFlags::finish(MegatronJob* result) const {
  result->ignored = ignored_;
  result->unmodelled = unmodelled_;
  for (const std::string& name : order_) {
    const KnownMegatronFlag known = known_megatron_flag(name);
    if (known.kind == MegatronFlagKind::kRead) continue;
    const std::vector<std::string>& given = given_.find(name)->second;
    const bool harmless = known.kind == MegatronFlagKind::kIgnored ||
                          (given.size() == 1 && given.front() == known.harmless);
    (harmless ? result->ignored : result->unmodelled).push_back(joined(name, given));
  }
}

}  // namespace bagualu
