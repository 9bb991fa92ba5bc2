#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace bagualu {

/// The file of a text FILE|NAME: an existing file, else NAME.json in one of the folders.
/// Throws:  InvalidInput(where, field) listing the known names.
std::filesystem::path resolve_config(const std::string& text,
                                     const std::vector<std::filesystem::path>& folders,
                                     const std::string& where, const std::string& field);

}  // namespace bagualu
