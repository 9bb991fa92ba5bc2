#pragma once

#include <filesystem>
#include <string_view>

namespace bagualu {

/// Writes a whole file so that a reader, or a restart after a crash, sees the old or the new
/// content. Writes a temporary file beside `path`, syncs it, renames it over `path`, syncs the
/// folder. A link is followed; a pipe or device is written to, not replaced.
/// Throws: InvalidInput if the folder is missing or not writable or the disk is full; the old
///         file is untouched and no temporary file stays behind.
void write_file_atomic(const std::filesystem::path& path, std::string_view bytes);

/// Complains before long work of what write_file_atomic() would complain of behind it: a folder
/// that is missing or not writable, a folder in the file's place. Tried, not asked: root may write
/// everywhere, and /proc nowhere. Leaves nothing.
/// Throws: InvalidInput.
void check_writable(const std::filesystem::path& path);

}  // namespace bagualu
