#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "bagualu/base/config_file.h"

namespace bagualu {

/// Where this program lies and what lies around it.
struct SourceTree {
  std::filesystem::path program;  ///< real path of the running binary, links resolved
  std::filesystem::path root;  ///< of the tree it was built in (ROOT/build*/bin); empty: installed
};

/// `program` is taken for a build of a tree if two folders above its own there is python/bagualu.
SourceTree source_tree_of(const std::filesystem::path& program);

/// Of the running binary.
SourceTree find_source_tree();

/// Folders that hold NAME.json of a kind ("models", "systems"): the tree's, or those of the Python
/// package that was installed with the program.
std::vector<std::filesystem::path> config_folders(const SourceTree& tree, const std::string& kind);

/// The file of --system FILE|NAME. The name "this-machine" is the file that `bagualu profile`
/// keeps, `home`/.cache/bagualu/this-machine.json. Throws:  as resolve_config(), and InvalidInput
/// with the way to make that file if it is absent.
std::filesystem::path resolve_system(const std::string& text, const SourceTree& tree,
                                     const std::filesystem::path& home, const std::string& where,
                                     const std::string& field);

/// $HOME; empty if it is not set.
std::filesystem::path home_folder();

}  // namespace bagualu
