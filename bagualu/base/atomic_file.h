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

}  // namespace bagualu
