#include "bagualu/base/config_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>
#include <system_error>

#include "bagualu/base/error.h"

namespace bagualu {
namespace fs = std::filesystem;

fs::path resolve_config(const std::string& text, const std::vector<fs::path>& folders,
                        const std::string& where, const std::string& field) {
  std::error_code status;
  if (text.empty()) throw InvalidInput(where, field, "an empty text", "a file or a name");
  if (fs::is_regular_file(text, status)) return text;
  std::set<std::string> names;
  for (const fs::path& folder : folders) {
    for (const auto& entry : fs::directory_iterator(folder, status)) {
      if (entry.path().extension() != ".json") continue;
      if (entry.path().stem() == text) return entry.path();
      names.insert(entry.path().stem().string());
    }
  }
  throw InvalidInput(
      where, field, fmt::format("\"{}\", no such file or name", text),
      names.empty() ? "a file" : fmt::format("a file, or one of {}", fmt::join(names, ", ")));
}

}  // namespace bagualu
