#pragma once

#include <type_traits>
#include <utility>
#include <variant>

#include "bagualu/base/error.h"

namespace bagualu {

/// Either a value or an expected failure that is no exception (Infeasible, OverBudget, a cache
/// miss). Ensures: value() on a failure and error() on a value throw InternalError. Source:  ours;
/// GCC 12 has no std::expected.
template <class T, class E>
class [[nodiscard]] Result {
  static_assert(!std::is_same_v<T, E>, "value and error need different types");

 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(E error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }

  const T& value() const& {
    BGL_CHECK(ok());
    return std::get<0>(state_);
  }
  T& value() & {
    BGL_CHECK(ok());
    return std::get<0>(state_);
  }
  T&& value() && {
    BGL_CHECK(ok());
    return std::get<0>(std::move(state_));
  }
  const E& error() const& {
    BGL_CHECK(!ok());
    return std::get<1>(state_);
  }

 private:
  std::variant<T, E> state_;
};

}  // namespace bagualu
