#include "bagualu/cli/source_tree.h"

#include <fmt/format.h>

#include <cstdlib>
#include <system_error>

#include "bagualu/base/error.h"

namespace bagualu {
namespace fs = std::filesystem;
namespace {

constexpr const char* kThisMachine = "this-machine";

}  // namespace

SourceTree source_tree_of(const fs::path& program) {
  SourceTree tree{program, {}};
  const fs::path root = program.parent_path().parent_path().parent_path();
  std::error_code status;
  if (fs::exists(root / "python" / "bagualu" / "__init__.py", status)) tree.root = root;
  return tree;
}

SourceTree find_source_tree() { return source_tree_of(fs::read_symlink("/proc/self/exe")); }

std::vector<fs::path> config_folders(const SourceTree& tree, const std::string& kind) {
  if (!tree.root.empty()) return {tree.root / "configs" / kind};
  // PREFIX/bin/bagualu beside PREFIX/lib/pythonX.Y/site-packages/bagualu, as pip installs them.
  std::vector<fs::path> folders;
  std::error_code status;
  const fs::path prefix = tree.program.parent_path().parent_path();
  for (const auto& entry : fs::directory_iterator(prefix / "lib", status)) {
    const fs::path package = entry.path() / "site-packages" / "bagualu" / "configs" / kind;
    if (fs::is_directory(package, status)) folders.push_back(package);
  }
  return folders;
}

fs::path resolve_system(const std::string& text, const SourceTree& tree, const fs::path& home,
                        const std::string& where, const std::string& field) {
  std::error_code status;
  if (text != kThisMachine || fs::is_regular_file(text, status)) {
    return resolve_config(text, config_folders(tree, "systems"), where, field);
  }
  const fs::path file = home / ".cache" / "bagualu" / fmt::format("{}.json", kThisMachine);
  if (home.empty() || !fs::is_regular_file(file, status)) {
    throw InvalidInput(where, field, fmt::format("{} without {}", kThisMachine, file.string()),
                       "this name after `bagualu profile --model NAME`, which measures this "
                       "machine and keeps that file");
  }
  return file;
}

fs::path home_folder() {
  const char* home = std::getenv("HOME");
  return home == nullptr ? fs::path() : fs::path(home);
}

}  // namespace bagualu
