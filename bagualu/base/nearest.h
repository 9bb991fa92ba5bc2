#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace bagualu {

/// Levenshtein distance: letters inserted, left out or replaced.
size_t edit_distance(std::string_view a, std::string_view b);

/// Of `names`, the one that `text` is most likely a misspelling of; the first of several, empty if
/// there are no names.
std::string nearest_name(std::string_view text, const std::vector<std::string>& names);

}  // namespace bagualu
