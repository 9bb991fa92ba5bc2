#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bagualu/model/megatron_args.h"

namespace bagualu {

/// Arguments as words: "--a b c --d=e" to {a: b c}, {d: e}; words before the first flag are left
/// out. Throws: InvalidInput(where) on "---" and the like.
std::vector<MegatronArgument> arguments_of_words(const std::vector<std::string>& words,
                                                 const std::string& where);

/// Typed, checked access to arguments; every complaint names `where` and the flag. Of a flag given
/// twice the last counts, as in Megatron.
class MegatronFlags {
 public:
  /// Throws: InvalidInput on a flag that Megatron does not have, or no longer.
  MegatronFlags(const std::vector<MegatronArgument>& arguments, std::string where);

  bool has(std::string_view name) const;
  /// A switch. Throws if it has values.
  bool on(std::string_view name) const;
  int64_t count(std::string_view name, int64_t min = 1, int64_t max = kMaxCount) const;
  int64_t count_or(std::string_view name, int64_t fallback, int64_t min = 1,
                   int64_t max = kMaxCount) const;
  double number_or(std::string_view name, double fallback, double min, double max) const;
  std::string text(std::string_view name) const;  ///< one value
  /// Throws unless the value is one of `allowed`.
  std::string choice_or(std::string_view name, std::string fallback,
                        const std::vector<std::string>& allowed) const;
  /// Several values: "[a b]", "a,b", a b. Empty if the flag is absent.
  std::vector<std::string> list(std::string_view name) const;

  /// "--name v1 v2".
  std::string as_given(std::string_view name) const;
  const std::string& where() const { return where_; }
  [[noreturn]] void fail(std::string_view name, std::string found, std::string allowed) const;
  /// Throws that the flag, which is given, contradicts others.
  [[noreturn]] void contradiction(std::string_view name, std::string allowed) const {
    fail(name, as_given(name), std::move(allowed));
  }

  /// Notes for the caller, beside those of unread flags.
  void unmodelled(std::string note) { unmodelled_.push_back(std::move(note)); }
  void unmodelled_if(std::string_view name, bool matters);
  /// The flag as given, to one list or the other.
  void unmodelled_or_ignored(std::string_view name, bool matters);
  void ignored(std::string note) { ignored_.push_back(std::move(note)); }
  /// Puts the notes and what was given of unread flags into the lists, in the order given.
  void finish(MegatronJob* result) const;

  /// Names in the order given, each once.
  const std::vector<std::string>& names() const { return order_; }

 private:
  static constexpr int64_t kMaxCount = int64_t{1} << 40;
  const std::vector<std::string>& values(std::string_view name) const;

  std::string where_;
  std::vector<std::string> order_;
  std::map<std::string, std::vector<std::string>, std::less<>> given_;
  std::vector<std::string> ignored_;
  std::vector<std::string> unmodelled_;
};

}  // namespace bagualu
