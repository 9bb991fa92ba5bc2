#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

#include "bagualu/runtime/host_arena.h"

namespace bagualu {
namespace {

namespace fs = std::filesystem;
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

std::optional<int64_t> read_int64(const fs::path& file) {
  std::ifstream in(file);
  int64_t number = 0;
  if (in >> number) {
    return number;
  }
  return std::nullopt;  // no such file, or "max"
}

/// The number after `key` in a file of "key number" lines.
std::optional<int64_t> read_keyed(const fs::path& file, const std::string& key) {
  std::ifstream in(file);
  std::string line;
  while (std::getline(in, line)) {
    std::istringstream fields(line);
    std::string found;
    int64_t number = 0;
    if (fields >> found >> number && found == key) {
      return number;
    }
  }
  return std::nullopt;
}

int64_t left_in_meminfo(const fs::path& root) {
  const auto kib = read_keyed(root / "proc/meminfo", "MemAvailable:");
  return kib ? *kib * 1024 : kUnlimited;
}

struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* reclaimable;
};
constexpr CgroupFiles kV2{"memory.max", "memory.current", "inactive_file"};
constexpr CgroupFiles kV1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};

int64_t left_in_group(const fs::path& group, const CgroupFiles& files) {
  const auto limit = read_int64(group / files.limit);
  const auto usage = read_int64(group / files.usage);
  if (!limit || !usage) {
    return kUnlimited;
  }
  // The kernel drops inactive page cache before it kills.
  const int64_t reclaimable = read_keyed(group / "memory.stat", files.reclaimable).value_or(0);
  return std::max<int64_t>(0, *limit - std::max<int64_t>(0, *usage - reclaimable));
}

/// Least of what `group` and the groups above it leave. Inside a container the group's path may
/// name a folder that only exists outside; then the mount's root is our own group.
int64_t left_in_groups(const fs::path& mount, const fs::path& group, const CgroupFiles& files) {
  int64_t left = left_in_group(mount, files);
  fs::path current = mount;
  for (const fs::path& part : group.relative_path()) {
    current /= part;
    left = std::min(left, left_in_group(current, files));
  }
  return left;
}

}  // namespace

int64_t available_host_bytes(const fs::path& root) {
  int64_t left = left_in_meminfo(root);
  const fs::path mount = root / "sys/fs/cgroup";
  std::ifstream groups(root / "proc/self/cgroup");
  std::string line;
  // Lines are "id:controllers:path"; v2 is "0::path", v1 lists "memory" among the controllers.
  while (std::getline(groups, line)) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const fs::path group = line.substr(second + 1);
    if (controllers.empty()) {
      left = std::min(left, left_in_groups(mount, group, kV2));
      left = std::min(left, left_in_groups(mount / "unified", group, kV2));
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      left = std::min(left, left_in_groups(mount / "memory", group, kV1));
    }
  }
  return left;
}

}  // namespace bagualu
